"""The weights in several versions, and the gradients in several buffers."""
