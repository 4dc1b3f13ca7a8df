WORD = "found in the package"
