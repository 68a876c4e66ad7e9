"""Exact other ways to compute the same client (see base.py).

rows.py      of a table, only the rows that a client's data names
low_rank.py  a dense layer on raw inputs without a copy of it per client
lookups.py   gradients of tables by the rows that were looked up
jaxpr.py     a loss as a list of operations, in which layers and lookups are found
"""

from mixfl.forms import lookups, low_rank, rows

# In the order in which they are chosen and applied. A new form is a line here.
CHOOSE = (rows.choose, low_rank.choose, lookups.choose)
