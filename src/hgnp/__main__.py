from hgnp.cli import app

app()
