"""Where an array lies."""

import os


def in_map_of(file, array) -> bool:
    """Does the array lie where the file is mapped into this process's memory?"""
    address = array.ctypes.data
    with open("/proc/self/maps") as maps:
        for line in maps:
            first, last = (int(x, 16) for x in line.split()[0].split("-"))
            if first <= address < last:
                return line.rstrip().endswith(os.path.realpath(file))
    return False
