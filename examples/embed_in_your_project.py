"""Use vitlite in another program: an index that finds the most similar photo."""

import torch

import vitlite


class PhotoIndex:
    """An index of photos by their vectors."""

    def __init__(self, model: str = "vit_nano_4.cifar10") -> None:
        self.model = vitlite.optimize(vitlite.create(model, num_classes=0))  # no head: the model returns vectors
        self.paths: list[str] = []
        self.vectors = torch.empty(0, self.model.config.embed_dim)

    @torch.inference_mode()
    def vector(self, path: str) -> torch.Tensor:
        return torch.nn.functional.normalize(self.model(self.model.preprocess(path)).float(), dim=-1).cpu()

    def add(self, paths: list[str]) -> dict[str, str]:
        """Add photos, and return those that could not be read, with the reason."""
        failed = {}
        for path in paths:
            try:
                self.vectors = torch.cat([self.vectors, self.vector(path)])
                self.paths.append(path)
            except vitlite.VitliteError as error:  # the base class of vitlite's errors
                failed[path] = str(error)
        return failed

    def closest(self, path: str) -> tuple[str, float]:
        score, i = (self.vector(path) @ self.vectors.T)[0].max(dim=0)
        return self.paths[int(i)], float(score)


if __name__ == "__main__":
    index = PhotoIndex()
    print("not read:", index.add([f"examples/photos/{name}" for name in ("coffee.png", "rocket.jpg", "missing.png")]))
    print(index.closest("examples/photos/chelsea.png"))
