"""Compute vectors of photos, of their patches, and of inner blocks: python examples/features.py PHOTO PHOTO..."""

import sys

import torch

import vitlite

photos = sys.argv[1:] or [f"examples/photos/{name}" for name in ("chelsea.png", "coffee.png", "rocket.jpg")]
model = vitlite.create("vit_nano_4.cifar10")
images = model.preprocess(photos)

with torch.inference_mode():
    vectors = model.embed(images)
    features = model.features(images, layers=(2, -1))

print(f"embed: {tuple(vectors.shape)}, the input of the head")
print(f"patches: {tuple(features.patches.shape)}, of a grid of {features.grid}")
print(f"blocks 2 and -1: {[tuple(layer.shape) for layer in features.layers]}")

print("\nHow similar the photos are (cosine):")
unit = torch.nn.functional.normalize(vectors, dim=-1)
for photo, row in zip(photos, unit @ unit.T, strict=True):
    print("  ".join(f"{value:5.2f}" for value in row.tolist()), photo)
