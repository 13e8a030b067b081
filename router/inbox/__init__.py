"""What comes from clients, bounded before it costs anything: JSON, the length of prompts, lanes."""
