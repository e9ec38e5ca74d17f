"""The demo: one small detector trained with a ranking loss and with focal loss, side by side."""
