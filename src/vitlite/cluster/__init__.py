"""Ray jobs that compute vectors and labels of millions of images on a cluster."""
