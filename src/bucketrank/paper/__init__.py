"""The paper's numbers: ``numbers.csv`` holds them, :mod:`bucketrank.paper.paper_rows` reads them."""
