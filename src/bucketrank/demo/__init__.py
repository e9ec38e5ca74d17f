"""The demo: one small detector trained twice, with a ranking loss and with focal loss, side by side."""
