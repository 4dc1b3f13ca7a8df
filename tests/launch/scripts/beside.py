WORD = "found beside the script"
