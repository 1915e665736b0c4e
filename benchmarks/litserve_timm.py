"""Serve a model of timm with LitServe, for benchmarks/serving.py: python benchmarks/litserve_timm.py NAME PORT."""

import base64
import io
import sys

import litserve
import torch
from peer_models import load
from PIL import Image


class Labels(litserve.LitAPI):
    """timm's model with its own transform. The batches are as large as those of examples/serve.py."""

    def setup(self, device: str) -> None:
        """Create the model, with random weights."""
        timm = load("timm")
        self.model = timm.create_model(sys.argv[1]).eval()
        self.transform = timm.data.create_transform(**timm.data.resolve_model_data_config(self.model))

    def decode_request(self, request: dict[str, str]) -> torch.Tensor:
        """Prepare an image."""
        return self.transform(Image.open(io.BytesIO(base64.b64decode(request["image"]))).convert("RGB"))

    def predict(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """Return the scores of a batch."""
        with torch.inference_mode():
            return self.model(torch.stack(list(batch))).softmax(-1)

    def encode_response(self, output: torch.Tensor) -> dict[str, list[float]]:
        """Return the five best labels of an image."""
        scores, indices = output.topk(5)
        return {"scores": scores.tolist(), "indices": indices.tolist()}


if __name__ == "__main__":
    api = Labels(max_batch_size=16, batch_timeout=0.01)
    server = litserve.LitServer(api, accelerator="cpu")
    server.run(port=int(sys.argv[2]), generate_client_file=False, log_level="error")
