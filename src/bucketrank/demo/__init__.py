"""The demo: train one small detector with a ranking loss and with focal loss, side by side."""
