"""What happens between a client's upload and the server's sums.

clipping.py   no client moves the model much further than clients usually do
robust.py     other centers than the mean, where uploads are held singly
"""
