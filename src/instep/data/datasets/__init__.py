"""The datasets that come with instep, one file each."""
