"""One rank's half of a save: what torch plans as data files of chunks, in the form that serves best."""
