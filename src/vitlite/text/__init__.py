"""Turn sentences into vectors with the text half of CLIP or SigLIP, and use the vectors of labels as a model's head."""
