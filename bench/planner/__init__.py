"""How many GPUs a load needs: formulas, checked by simulation."""
