"""Programs that generated files of this repository. The product imports none of them."""
