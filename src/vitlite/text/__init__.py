"""The text half of CLIP and SigLIP: sentences become vectors, and the vectors of labels become the head of a model."""
