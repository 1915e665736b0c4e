"""Classify photos: python examples/classify.py PHOTO...

The model comes with vitlite and knows the ten classes of CIFAR-10. With network access, try "vit_base_16", which knows
a thousand.
"""

import sys

import vitlite

MODEL = "vit_nano_4.cifar10"

photos = sys.argv[1:] or ["examples/photos/chelsea.png"]
model = vitlite.create(MODEL)
for photo, answers in zip(photos, model.predict(photos, top=3), strict=True):
    print(photo)
    for label, _, score in answers:
        print(f"  {score:6.1%}  {label}")
