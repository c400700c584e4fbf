"The page Works with shows what the tests measure: every row, no other, and none that fails"
import importlib,json
from matrix import *

here = Path(__file__).resolve().parent
marked = [r for p in sorted(here.glob('test_with_*.py')) for r in rows_of(importlib.import_module(p.stem))]
key = lambda r: (r['group'],r['name'])
def shown(): return {key(r):r for r in json.loads((here/'works_with.json').read_text())['rows']}

def test_one_meaning():
    "Tests that share a row agree on what it says"
    twice = {key(r) for i,r in enumerate(marked) for o in marked[:i] if key(o)==key(r)}
    assert not twice, f'marked in two ways: {twice}'

def test_every_row():
    "Run `make works` when this fails"
    page = shown()
    assert {key(r) for r in marked}==set(page)
    for r in marked: assert {k:page[key(r)][k] for k in r}==r

def test_none_fails():
    for r in shown().values(): assert r['raises'] or r['error'] is None or r['error']<=r['tol'], r

def test_page():
    "The committed page is that of the committed figures"
    nb = json.loads((here.parent/'nbs'/'works_with.ipynb').read_text())
    text = '\n'.join(''.join(o['data']['text/markdown']) for c in nb['cells'] for o in c.get('outputs', []) if 'text/markdown' in o.get('data', {}))
    lines = text.splitlines()
    for r in shown().values():
        line = [l for l in lines if l.startswith(f"| {r['name']} | {'' if r['raises'] else r['compared']} |") and l.endswith(f"{r['note']} |")]
        assert len(line)==1 and ('raises' if r['raises'] else f"{r['error']:.0e}" if r['error'] else '|') in line[0], r['name']
