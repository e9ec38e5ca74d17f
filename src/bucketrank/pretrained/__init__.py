"""Models of torchvision and transformers behind the interface of our detectors, with their pretrained weights."""
