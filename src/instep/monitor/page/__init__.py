"""The live page of `instep watch`: a view of each run, folded from its event log, and a server that sends what is new.

[Note: Cursors]
A view keeps the numbers of a run in tables (`table.py`) that grow by rows and, when a restart makes steps again, lose
rows at their end first. A browser gets the down-sampled tables once, and with them a cursor: for each table how many
rows it has and how often it was rewound. Every later message is made from the cursor alone: "replace your buckets from
number N on by these". So the server remembers nothing about a browser, and a browser that lost its connection sends its
cursor and gets what it missed, not the history. Buckets hold 2^level rows, counted from the first one; when a table has
too many of them, the level rises, and the browser merges its own pairwise, which gives exactly the server's buckets.
"""
