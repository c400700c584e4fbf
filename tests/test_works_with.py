"""The pages "What is exact and what is not" and "What we tested" show what the tests measure: every row, and no other.
Run `make works` when this fails"""
from matrix import *

def test_every_row():
    "Tests that share a row say the same about it, as the page does"
    page,rows = committed(),all_rows()
    assert {key(r) for r in rows}==set(page)
    for r in rows: assert {k:page[key(r)][k] for k in r}==r
    for r in page.values():   # none fails
        assert (r['raises'] is None) != (r['error'] is None) and (r['raises'] or r['error']<=r['tol']), r

def cell(text): return text.replace('|', '\\|').replace('`', "'")

def test_pages_of_the_rows():
    "The committed pages are those of the committed figures"
    nbs = Path(__file__).resolve().parents[1]/'nbs'
    pages = [json.loads((nbs/f'{o}.ipynb').read_text(encoding='utf-8')) for o in ('works_with','tested')]
    cells = [c for page in pages for c in page['cells']]
    tables = [c for c in cells if c['cell_type']=='code' and 'table("' in ''.join(c['source'])]
    text = '\n'.join(''.join(o['data']['text/markdown']) for c in tables for o in c['outputs'])
    lines = [l for l in text.splitlines() if l.startswith('| ') and not l.startswith(('| ---','| With |'))]
    assert len(lines)==len(committed())
    for r in committed().values():
        line = [l for l in lines if l.startswith(f"| {r['name']} | {'' if r['raises'] else r['compared']} |")
                and l.endswith(f"{r['note']} |")]
        assert len(line)==1 and (cell(r['raises']) if r['raises'] else figure(r['error'])) in line[0], r['name']
