"""Files that inference engines load without converting them, made by running the engines' own loaders."""
