"""A batch's update: launched when its gradients are there, completed when its version is needed."""
