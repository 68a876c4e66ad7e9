"""Other exact ways to compute the same client (see base.py).

rows.py          a client gets only the table rows that its data names
low_rank.py      a dense layer on raw inputs without a copy of it per client
turned.py        weights of dense layers with the longer axis last
one_by_one.py    clients with branches or loops of unknown length, not in groups
first_layers.py  finds such layers in a loss
lookups.py       gradients of tables, as the rows that were looked up
products.py      a loss with its convolutions (convolution.py) and poolings (pooling.py) as products
flops.py         counts the products of a loss
jaxpr.py         a loss as a list of operations: shows how it uses a parameter
"""

from mixfl.forms import lookups, low_rank, one_by_one, rows, turned

# In the order in which they are chosen and applied. A new form is a line here.
CHOOSE = (rows.choose, low_rank.choose, lookups.choose, turned.choose, one_by_one.choose)
