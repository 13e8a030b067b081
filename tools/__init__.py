"""Programs that made files of the tree. The product imports none of them."""
