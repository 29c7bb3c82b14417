"""How the demo model's weights are made: written facts, generated conversations, one script."""
