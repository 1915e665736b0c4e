"""Make models faster for inference, and measure their speed."""
