"""Draw where a model looks in a photo: python examples/attention.py PHOTO

Writes attention.png (each head of the last block) and rollout.png (attention followed through all blocks).
"""

import sys

import vitlite
from vitlite import plots

photo = sys.argv[1] if len(sys.argv) > 1 else "examples/photos/chelsea.png"
model = vitlite.create("vit_nano_4.cifar10", image_size=96)  # larger than it was trained for: a finer grid

plots.draw_attention(model, photo).save("attention.png")
plots.draw_attention(model, photo, rolled_out=True).save("rollout.png")

# The same as numbers:
grids = plots.attention(model, model.preprocess(photo))[0]  # (heads, h, w)
for head, grid in enumerate(grids):
    row, column = divmod(int(grid.argmax()), grid.shape[1])
    print(
        f"head {head} looks most at patch ({row}, {column}) of {tuple(grid.shape)}: {grid.max():.1%} of its attention"
    )
