"""Weights, images and ground truth by formula: both sides of a comparison generate them and store nothing.

Every value depends on a text, a salt and a flat index only. The arithmetic is 64-bit integers and IEEE doubles without
transcendental functions except ``sqrt``, so every platform gets the same bits. Only numpy is needed.

    state = {key: fill(key, shape, salt) for key, shape in keys_and_shapes}      # a checkpoint
    pixels = image("image0", 256, 320)                                           # (3, 256, 320), already normalised
"""

import re
import zlib

import numpy as np

# First match wins: key pattern, offset and gain of "offset + gain * uniform", and a kind. "fan" multiplies the gain by
# sqrt(3 / fan_in): unit input variance then gives unit output variance. "anchors" lowers the offset by 4 if the head
# has more than one anchor per cell.
RULES = (
    (r"running_mean$", 0.0, 0.1, ""),
    (r"running_var$", 1.0, 0.5, ""),
    (r"\.scale$", 1.0, 0.25, ""),  # one factor per pyramid level
    (r"sampling_offsets\.bias$", 0.0, 3.0, ""),  # deformable attention looks about three cells away
    (r"(embeds|embed\.weight|embedding\.weight)$", 0.0, 1.0, ""),
    (r"(atss|retina)_cls\.weight$", 0.0, 6.0, "fan"),  # spread the class scores
    (r"atss_cls\.bias$", -12.0, 0.5, "anchors"),
    (r"retina_cls\.bias$", -16.0, 0.5, ""),
    (r"(atss|retina|rpn)_reg\.weight$", 0.0, 0.4, "fan"),  # keep boxes near their anchors
    (r"fc_cls\.weight$", 0.0, 2.5, "fan"),
    (r"bbox_head\.\d\.fc_cls\.bias$", -5.0, 0.5, ""),  # cascade: the mean of three stages
    (r"fc_cls\.bias$", -8.0, 0.5, ""),
    (r"fc_reg\.weight$", 0.0, 0.8, "fan"),
    (r"conv_logits\.weight$", 0.0, 6.0, "fan"),  # spread the mask probabilities
    (r"cls_branches\.6\.weight$", 0.0, 16.0, "fan"),  # ranks the encoder tokens: far apart
    (r"cls_branches\.\d\.weight$", 0.0, 6.0, "fan"),
    (r"cls_branches\.\d\.bias$", -16.0, 0.5, ""),
    (r"bias$", 0.0, 0.1, ""),
    (r"weight$", 0.0, 1.0, "fan"),
)
GAMMA, M1, M2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def uniform(name, count, salt=0):
    """Return ``count`` float64 values in [-1, 1): splitmix64 in counter mode, seeded with name and salt."""
    seed = np.uint64(zlib.crc32(name.encode()) << 32 | salt)
    z = np.arange(1, count + 1, dtype=np.uint64) * GAMMA + seed  # modulo 2**64
    z = (z ^ (z >> np.uint64(30))) * M1
    z = (z ^ (z >> np.uint64(27))) * M2
    z ^= z >> np.uint64(31)
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1.0


def fill(name, shape, salt=0):
    """Return the tensor of a state-dict key: float32, but int64 zero for ``num_batches_tracked``."""
    shape = tuple(shape)
    if name.endswith("num_batches_tracked"):
        return np.zeros(shape, np.int64)
    if len(shape) == 1 and name.endswith("weight"):  # batch, group and layer norm
        offset, gain, kind = 1.0, 0.25, ""
    else:
        offset, gain, kind = next(rule[1:] for rule in RULES if re.search(rule[0], name))
    if kind == "anchors" and shape[0] > 80:  # three anchors for each cell instead of one: more chances of a high score
        offset -= 4.0
    if kind == "fan":
        gain = gain * np.sqrt(3.0 / np.prod(shape[1:]))
    return (offset + gain * uniform(name, int(np.prod(shape)), salt)).reshape(shape).astype(np.float32)


def image(name, height, width, salt=0, cell=16):
    """Return a (3, height, width) float32 image: a coarse random grid, bilinearly enlarged, plus noise."""
    rows, columns = -(-height // cell) + 1, -(-width // cell) + 1
    grid = 2.0 * uniform(name + "/grid", 3 * rows * columns, salt).reshape(3, rows, columns)
    y, x = np.arange(height), np.arange(width)
    ty, tx = ((y % cell) / cell)[:, None], (x % cell) / cell
    above = grid[:, y // cell][:, :, x // cell] * (1 - tx) + grid[:, y // cell][:, :, x // cell + 1] * tx
    below = grid[:, y // cell + 1][:, :, x // cell] * (1 - tx) + grid[:, y // cell + 1][:, :, x // cell + 1] * tx
    noise = 0.4 * uniform(name + "/noise", 3 * height * width, salt).reshape(3, height, width)
    return (above * (1 - ty) + below * ty + noise).astype(np.float32)


def ellipses(boxes, height, width):
    """Return the (N, height, width) uint8 masks of the ellipses inscribed in boxes (x1, y1, x2, y2)."""
    y, x = np.arange(height)[:, None] + 0.5, np.arange(width) + 0.5
    parts = [
        ((x - (a + c) / 2) / ((c - a) / 2)) ** 2 + ((y - (b + d) / 2) / ((d - b) / 2)) ** 2 < 1
        for a, b, c, d in np.array(boxes, np.float64)
    ]
    return np.stack(parts).astype(np.uint8)


# Ground truth of the training side, in pixels, one list for each image.
OBJECTS = {
    "image0": (((20, 30, 110, 150), 17), ((150, 60, 300, 210), 0), ((200, 140, 250, 200), 56), ((60, 170, 98, 214), 2)),
    "image1": (((10, 12, 90, 72), 3), ((120, 40, 280, 200), 25), ((60, 120, 102, 168), 0)),
    # A second ground truth for image0: four objects as large as the image. Every query overlaps them.
    "large": (((0, 0, 320, 256), 17), ((0, 0, 320, 256), 0), ((0, 0, 320, 256), 56), ((0, 0, 320, 256), 2)),
}
SIZES = {"image0": (256, 320), "image1": (224, 300)}  # height, width; image1 is padded with zeros to the size of image0
