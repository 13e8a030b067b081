"""The ways in which blocks move between endpoints: a file and a class for each transport."""
