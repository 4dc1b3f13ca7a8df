"""The file that holds what a Task's `preprocess()` returned: in a run directory's `files`, and in exports."""

FITTED_FILE = "preprocess.json"
