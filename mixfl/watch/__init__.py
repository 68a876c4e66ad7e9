"""`mixfl watch`: a page on this machine that follows runs.

runs_below finds run folders, run_state reads one, curves reads its metrics as they grow, board
keeps all of them, and server serves them to the page (mixfl/report/page/watch.*).
"""
