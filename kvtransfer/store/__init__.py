"""The store of KV: blocks that outlive the workers that computed them."""
