"""Synthetic data for the smile task: small drawn faces, with a different style for each client.

The label changes one number of a face, the bend of its mouth. Everything else (pose, skin, hair,
light, teeth, noise) does not depend on the label, so a model that has seen only smiling faces can
hardly tell the labels apart. Mixed federated learning repairs this.

A face is drawn in layers on a square from -1 to 1 (x to the right, y downwards).
"""

import numpy as np

# mean, deviation between clients, deviation between the images of a client
_TRAITS = {
    "x": (0.0, 0.025, 0.03),  # place of the face
    "y": (-0.02, 0.025, 0.03),
    "scale": (1.2, 0.03, 0.03),
    "tilt": (0.0, 0.03, 0.04),  # radians
    "turn": (0.0, 0.01, 0.015),  # of eyes, nose and mouth against the head
    "width": (0.55, 0.025, 0.0),  # of the head
    "eyes": (0.105, 0.008, 0.012),
    "gaze": (0.0, 0.0, 0.012),
    "brow": (0.0, 0.015, 0.02),
    "mouth_width": (0.33, 0.015, 0.02),
    "lips": (0.06, 0.006, 0.006),
    "open": (0.02, 0.015, 0.045),  # half the opening of the mouth; closed if negative
    "teeth": (0.75, 0.1, 0.25),  # brightness of the open mouth, from dark to teeth
    "fringe": (-0.40, 0.07, 0.0),
    "parting": (0.0, 0.15, 0.0),
    "light_x": (0.0, 0.12, 0.08),
    "light_y": (-0.08, 0.06, 0.05),
    "light": (1.0, 0.08, 0.09),
    "contrast": (1.0, 0.08, 0.1),
}
_POSE = ("x", "y", "scale", "tilt", "turn")  # traits that grow with the difficulty
_SKIN = np.array([(0.98, 0.84, 0.74), (0.88, 0.67, 0.51), (0.70, 0.48, 0.34), (0.45, 0.29, 0.20)])
_HAIR = np.array([(0.10, 0.08, 0.08), (0.32, 0.20, 0.12), (0.82, 0.63, 0.32), (0.62, 0.60, 0.60)])
_CHUNK = 2**17  # pixels drawn at a time, so that a plane stays in the cache


def faces(
    clients: int, per_client: int, *, size: int = 84, difficulty: float = 0.5, seed: int = 0
) -> dict[str, np.ndarray]:
    """Draws smiling and unsmiling faces of many clients.

    Returns `{"image": uint8 [n, size, size, 3], "smiling": uint8 [n], "client": int64 [n]}`, with
    rows grouped by client and clients numbered from 0. The same arguments give the same bits.

    A client has Poisson(per_client) images, at least 2. Half of them smile (the odd one may go
    either way). Its style is skin tone, hair, clothes, background, light and usual pose; its images
    vary around that. The bend of the mouth is Gaussian with mean +0.18 (smiling: corners up) or
    -0.1 (not smiling: straight or turned down), in units of about half the image. Its deviation
    grows with the difficulty d: at d = 0, 0.5 and 1, the means are 7, 3.6 and 2.4 deviations apart,
    so even the true bend has an AUC of only 1.0, 0.995 and 0.955. An image's own variation of pose
    (shifts of 0.75 to 2.25 % of its size) and the pixel noise (0.02 to 0.07) grow with d too.
    """
    _check(clients, per_client, size, difficulty, seed)
    rng = np.random.default_rng(seed)
    client = np.repeat(np.arange(clients), np.maximum(2, rng.poisson(per_client, clients)))
    n = len(client)
    # in a random order within each client, every second face smiles
    smiling = np.lexsort((rng.random(n), client)) % 2

    traits: dict[str, np.ndarray] = {}
    for name, (mean, between, within) in _TRAITS.items():
        spread = 0.5 + difficulty if name in _POSE else 1.0
        value = mean + between * rng.standard_normal(clients)[client]
        traits[name] = value + within * spread * rng.standard_normal(n)
    bend_deviation = 0.28 / np.interp(difficulty, (0, 0.5, 1), (7, 3.6, 2.4))
    traits["bend"] = np.where(smiling, 0.18, -0.1) + bend_deviation * rng.standard_normal(n)
    traits["long_hair"] = rng.choice((0.0, 1.0), clients)[client]
    traits["hair"] = (rng.random(clients) < 0.9)[client]

    skin = _mix(_SKIN, rng.random(clients))
    colors = {
        "skin": skin,
        "hair": _mix(_HAIR, rng.random(clients) ** 1.5),
        "lips": 0.62 * skin * (1.1, 0.6, 0.65),
        "shirt": rng.uniform(0.1, 0.9, (clients, 3)),
        "top": rng.uniform(0.35, 0.9, (clients, 3)),
        "bottom": rng.uniform(0.35, 0.9, (clients, 3)),
        "iris": _mix(np.array([(0.15, 0.1, 0.06), (0.2, 0.35, 0.5)]), rng.random(clients)),
    }

    image = np.empty((n, size, size, 3), np.uint8)
    step = max(1, _CHUNK // size**2)
    for start in range(0, n, step):
        rows = slice(start, start + step)
        image[rows] = _draw(
            {k: v[rows, None, None].astype(np.float32) for k, v in traits.items()},
            {k: v[client[rows]].T[..., None, None].astype(np.float32) for k, v in colors.items()},
            size,
            0.02 + 0.05 * float(difficulty),
            rng,
        )
    return {"image": image, "smiling": smiling.astype(np.uint8), "client": client}


def _draw(
    t: dict[str, np.ndarray],  # traits, each [n, 1, 1]
    c: dict[str, np.ndarray],  # colors, each [3, n, 1, 1]
    size: int,
    noise: float,
    rng: np.random.Generator,
) -> np.ndarray:
    """Draw the faces of one chunk: uint8 [n, size, size, 3]."""
    grid = ((np.arange(size, dtype=np.float32) + 0.5) * 2 / size - 1)[:, None]
    down, right = grid[None], grid.T[None]
    x, y = (right - t["x"]) / t["scale"], (down - t["y"]) / t["scale"]
    x, y = x + t["tilt"] * y, y - t["tilt"] * x
    pixels = size / 2  # per unit of length: edges are one pixel soft

    def edge(inside: np.ndarray) -> np.ndarray:
        return np.clip(inside * pixels + 0.5, 0, 1)

    def ellipse(
        x: np.ndarray, y: np.ndarray, a: np.ndarray | float, b: np.ndarray | float
    ) -> np.ndarray:
        return edge((1 - np.sqrt((x / a) ** 2 + (y / b) ** 2)) * np.minimum(a, b, dtype=np.float32))

    def paint(mask: np.ndarray, color: np.ndarray | np.float32) -> None:
        for plane, value in zip(canvas, np.broadcast_to(color, c["skin"].shape), strict=True):
            plane += mask * (value - plane)

    canvas = c["top"] + (c["bottom"] - c["top"]) * (down + 1) / 2 + np.zeros_like(x)
    long = t["long_hair"]
    mane = ellipse(x, y + 0.12 - 0.3 * long, t["width"] + 0.1, 0.7 + 0.2 * long)
    paint(t["hair"] * mane, c["hair"])
    paint(ellipse(x, y - 0.75, 0.2, 0.4), 0.85 * c["skin"])
    paint(ellipse(x, y - 1.25, 0.85, 0.45), c["shirt"])
    fringe = edge(t["fringe"] + t["parting"] * x + 0.3 * x * x - y)
    paint(ellipse(x, y, t["width"], 0.7) * (1 - t["hair"] * fringe), c["skin"])

    x = x - t["turn"]
    side = np.abs(x) - 0.23
    paint(ellipse(side, y + 0.29 + t["brow"] - side**2 * 3, 0.14, 0.03), 0.6 * c["hair"])
    paint(ellipse(side, y + 0.1, 0.115, 0.6 * t["eyes"]), np.float32(0.95))
    paint(ellipse(np.abs(x - t["gaze"]) - 0.23, y + 0.1, 0.055, 0.055), c["iris"])
    paint(ellipse(x, y - 0.13, 0.07, 0.05), 0.8 * c["skin"])

    # a parabola that keeps its mean height: a bend moves corners and middle, not the mouth
    arch = 1 - (x / t["mouth_width"]) ** 2
    off = np.abs(y - 0.38 - t["bend"] * (arch - 2 / 3))
    opening = np.maximum(t["open"], 0) * arch
    ends = edge(arch * t["mouth_width"] / 2)
    paint(ends * edge(opening + t["lips"] - off), c["lips"])
    inner = np.clip(t["teeth"], 0.15, 1) * np.float32(0.95)
    paint(ends * edge(opening - off - 0.5 / pixels), inner)

    canvas *= t["light"] * (1 + t["light_x"] * right + t["light_y"] * down)
    canvas = (canvas - 0.5) * t["contrast"] + 0.5
    canvas += noise * rng.standard_normal(canvas.shape, np.float32)
    return (np.clip(canvas, 0, 1) * 255 + 0.5).astype(np.uint8).transpose(1, 2, 3, 0)


def _mix(palette: np.ndarray, where: np.ndarray) -> np.ndarray:
    """Colors along a palette, `where` from 0 (its first) to 1 (its last): [n, 3]."""
    stops = np.linspace(0, 1, len(palette))
    return np.stack([np.interp(where, stops, channel) for channel in palette.T], axis=1)


def _check(clients: int, per_client: int, size: int, difficulty: float, seed: int) -> None:
    for name, value, least in (
        ("clients", clients, 1),
        ("per_client", per_client, 2),
        ("size", size, 8),
        ("seed", seed, 0),
    ):
        if not isinstance(value, int | np.integer) or value < least:
            raise ValueError(
                f"{name} is {value!r}, expected a whole number of at least {least}: "
                f"pass {name}={least} or more"
            )
    if not 0 <= difficulty <= 1:
        raise ValueError(
            f"difficulty is {difficulty!r}, expected a number from 0 to 1: "
            "pass 0 for clear mouths, 0.5 for the default, 1 for the most overlap"
        )
