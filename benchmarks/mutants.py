"""Which small mistakes in the package do the tests find? `python benchmarks/mutants.py -j 2 --save`

Each mutant is a copy of the package with one change: another comparison, a constant that is larger by one, `or` for `and`,
a statement left out. It runs the tests that execute the changed line, the fastest first, until one fails.
Mutants are drawn by a fixed seed, from each module in proportion to its lines. Needs pytest-cov."""
import argparse,ast,hashlib,json,os,random,re,shutil,signal,subprocess,sys,tempfile,time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

root = Path(__file__).resolve().parents[1]
package = root/'fastai_accum'
swapped = {ast.Lt:ast.LtE, ast.LtE:ast.Lt, ast.Gt:ast.GtE, ast.GtE:ast.Gt, ast.Eq:ast.NotEq, ast.NotEq:ast.Eq, ast.Is:ast.IsNot,
           ast.IsNot:ast.Is, ast.In:ast.NotIn, ast.NotIn:ast.In, ast.Add:ast.Sub, ast.Sub:ast.Add, ast.Mult:ast.Div,
           ast.Div:ast.Mult, ast.And:ast.Or, ast.Or:ast.And}
left_out = ast.Expr,ast.AugAssign,ast.Raise,ast.Delete,ast.Continue,ast.Break
never = ast.Import,ast.ImportFrom,ast.JoinedStr,ast.Global,ast.Nonlocal   # a text is only a message

def mistakes(o):
    "What may be wrong in the node `o`: nodes of it, and what stands in their place"
    if isinstance(o, ast.Compare) and len(o.ops)==1: yield o,ast.Compare(o.left, [swapped[type(o.ops[0])]()], o.comparators)
    if isinstance(o, ast.BinOp) and type(o.op) in swapped: yield o,ast.BinOp(o.left, swapped[type(o.op)](), o.right)
    if isinstance(o, ast.BoolOp): yield o,ast.BoolOp(swapped[type(o.op)](), o.values)
    if isinstance(o, ast.UnaryOp) and isinstance(o.op, ast.Not): yield o,o.operand
    if isinstance(o, (ast.If,ast.While,ast.IfExp)): yield o.test,ast.UnaryOp(ast.Not(), o.test)
    if isinstance(o, ast.comprehension): yield from ((p,ast.UnaryOp(ast.Not(), p)) for p in o.ifs)
    if isinstance(o, ast.Constant) and type(o.value) is bool: yield o,ast.Constant(not o.value)
    if isinstance(o, ast.Constant) and type(o.value) in (int,float): yield o,ast.Constant(o.value+1)
    if isinstance(o, ast.Return) and o.value: yield o.value,ast.Constant(None)
    sets = isinstance(o, ast.Assign) and all(isinstance(t, (ast.Attribute,ast.Subscript)) for t in o.targets)
    if isinstance(o, left_out) or sets: yield o,ast.Pass()

def walk(o, stmt=None, at=((1,10**6),)):
    "Each mistake in `o`, and the lines that run it; what runs at import is tested by what runs its function, class or module"
    is_text = isinstance(o, ast.Expr) and isinstance(o.value, ast.Constant)
    is_all = isinstance(o, ast.Assign) and getattr(o.targets[0], 'id', '')=='__all__'
    if isinstance(o, never) or is_text or is_all: return
    is_function = isinstance(o, (ast.FunctionDef,ast.AsyncFunctionDef))
    if isinstance(o, ast.stmt): stmt = o
    here = at
    if at=='body' and stmt:
        here = ((stmt.lineno, max(stmt.lineno, stmt.body[0].lineno-1) if hasattr(stmt, 'body') else stmt.end_lineno),)
    for old,new in mistakes(o): yield old,new,here
    if isinstance(o, ast.Raise) or getattr(getattr(o, 'func', None), 'attr', '')=='warn': return
    for name,vs in ast.iter_fields(o):
        if name in ('annotation','returns','decorator_list'): continue
        inside = at
        if is_function: inside = 'body' if name=='body' else ((o.body[0].lineno,o.end_lineno),)
        elif isinstance(o, ast.ClassDef): inside = (o.lineno,o.end_lineno),(1,10**6)
        for v in vs if isinstance(vs, list) else [vs]:
            if isinstance(v, ast.AST): yield from walk(v, stmt, inside)

def mutated(source, old, new):
    "`source` with `new` for `old`; the rest stays as it is, with its comments"
    data = source.encode()
    starts = [0]
    for line in data.split(b'\n'): starts.append(starts[-1]+len(line)+1)
    a,b = starts[old.lineno-1]+old.col_offset,starts[old.end_lineno-1]+old.end_col_offset
    text = f'({ast.unparse(new)})' if isinstance(old, ast.expr) else ast.unparse(new)
    return (data[:a]+text.encode()+data[b:]).decode()

def draw(n, seed):
    "About `n` mutants, from each module in proportion to its lines"
    files = [o for o in sorted(package.rglob('*.py')) if o.name not in ('__init__.py','_modidx.py','all.py')]
    sources = {o.relative_to(package).as_posix():o.read_text(encoding='utf-8') for o in files}
    lines = {k:sum(bool(o.strip()) for o in s.split('\n')) for k,s in sources.items()}
    for module,source in sources.items():
        found = list(walk(ast.parse(source)))
        k = max(1, round(n*lines[module]/sum(lines.values())))
        for old,new,at in random.Random(f'{seed} {module}').sample(found, min(k, len(found))):
            was,now = (' '.join(ast.unparse(o).split()) for o in (old,new))
            yield dict(id=f'{module}:{old.lineno}:{old.col_offset}:{now}'[:60].replace(' ', ''), module=module, line=old.lineno,
                       what=f'{was} -> {now}', at=at, source=mutated(source, old, new))

def pytest(tests, path, *args, limit=None, **env):
    "Run pytest with the package in `path`; its exit status and output, or `None` if it takes more than `limit` seconds"
    paths = os.pathsep.join([str(path), os.environ.get('PYTHONPATH', ''), str(Path(__file__).parent)])
    cmd = [sys.executable, '-P', '-m', 'pytest', '-q', '--tb=no', '-p', 'no:cacheprovider', *map(str, args)]
    env = {**os.environ, 'PYTHONPATH':paths, 'OMP_NUM_THREADS':'1', 'PYTHONDONTWRITEBYTECODE':'1', **env}
    kw = dict(cwd=tests.parent, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding='utf-8', errors='replace')
    p = subprocess.Popen(cmd, start_new_session=True, **kw)
    try: out = p.communicate(timeout=limit)[0]
    except subprocess.TimeoutExpired: out = None
    with suppress(ProcessLookupError): os.killpg(p.pid, signal.SIGKILL)   # processes that tests have left
    return out is not None and (p.wait(),out)

def pytest_runtest_logreport(report):
    "pytest calls this, as a plugin: note what each part of a test took, and how it ended"
    if 'PYTEST_XDIST_WORKER' in os.environ: return
    with open(os.environ['MUTANTS_LOG'], 'a', encoding='utf-8') as f:
        f.write(json.dumps([report.nodeid, report.outcome, report.duration])+'\n')

def recorded(tests, j, args):
    "The seconds of each test that passes, and the lines of each module that it runs: `{test: (seconds, {module: lines})}`"
    sources = [o for d in (package,tests) for o in sorted(d.rglob('*.py'))]
    state = hashlib.sha256(b''.join(o.read_bytes() for o in sources)+' '.join(args).encode()).hexdigest()
    file = tests/'.mutants.json'
    if file.exists() and (was := json.loads(file.read_text(encoding='utf-8')))['state']==state: return was['tests']
    from coverage import CoverageData
    with tempfile.TemporaryDirectory() as d:
        log,data = Path(d)/'log',Path(d)/'coverage'
        out = pytest(tests, root, '-p', 'mutants', '-n', j, f'--cov={package}', '--cov-context=test', '--cov-report=',
                     *(args or [tests]), MUTANTS_LOG=str(log), COVERAGE_FILE=str(data))[1]
        print(out.strip().split('\n')[-1])
        seconds,failed,lines = defaultdict(float),set(),defaultdict(dict)
        for test,outcome,took in map(json.loads, log.read_text(encoding='utf-8').splitlines()):
            seconds[test] += took
            if outcome!='passed': failed.add(test)
        found = CoverageData(str(data)); found.read()
        for f in found.measured_files():
            for line,contexts in found.contexts_by_lineno(f).items():
                for test in {o.rpartition('|')[0] for o in contexts}-{''}:
                    lines[test].setdefault(Path(f).relative_to(package).as_posix(), []).append(line)
    res = {o:(round(seconds[o], 2), lines[o]) for o in seconds if o not in failed}
    file.write_text(json.dumps(dict(state=state, tests=res)), encoding='utf-8')
    return res

def covers(found, mutant):
    "The tests that run the changed line, the fastest first"
    for a,b in mutant['at']:
        res = [o for o,(_,lines) in found.items() if any(a<=line<=b for line in lines.get(mutant['module'], []))]
        if res: return sorted(res, key=lambda o: found[o][0])
    return []

def tried(mutant, tests, found, limit):
    "The test that finds `mutant`, or that it survives"
    ids,took = [],0.
    for o in (every := covers(found, mutant)):
        if ids and took+found[o][0]>limit: break
        ids.append(o); took += found[o][0]
    said = f'survives {len(ids)} of {len(every)} tests'
    if ids:
        with tempfile.TemporaryDirectory() as d:
            path = Path(d)/package.name
            shutil.copytree(package, path, ignore=shutil.ignore_patterns('__pycache__'))
            (path/mutant['module']).write_text(mutant['source'], encoding='utf-8')
            (Path(d)/'tests').write_text('\n'.join(ids), encoding='utf-8')
            res = pytest(tests, d, '-x', '-rfE', f'@{d}/tests', limit=60+5*took)
        if not res: said = 'takes too long'
        elif res[0]: said = next(iter(re.findall(r'^(?:FAILED|ERROR) (.*?)(?: - |$)', res[1], re.M)), f'pytest ends with {res[0]}')
    print(f"{mutant['id']}  {mutant['what']}\n    {said}", flush=True)
    return {k:mutant[k] for k in ('id','module','line','what')} | dict(found_by=None if 'survives' in said else said, result=said)

if __name__=='__main__':
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('-n', type=int, default=160, help='how many mutants, about')
    p.add_argument('-j', type=int, default=2, help='processes')
    p.add_argument('--seed', type=int, default=0)
    p.add_argument('--limit', type=float, default=300., help='seconds of tests for a mutant, those that take the least first')
    p.add_argument('--tests', type=Path, default=root/'tests', help='the folder of tests, which may be of another checkout')
    p.add_argument('--args', nargs='*', default=[], help='for pytest, when it records what each test runs: fewer tests, say')
    p.add_argument('--only', nargs='*', help='the ids of the mutants to try')
    p.add_argument('--save', nargs='?', type=Path, const=root/'benchmarks'/'results'/'mutants.json', help='where the results go')
    o = p.parse_args()
    tests = o.tests.resolve()
    found,start = recorded(tests, o.j, o.args),time.time()
    mutants = [m for m in draw(o.n, o.seed) if not o.only or m['id'] in o.only]
    with ThreadPoolExecutor(o.j) as pool:
        rows = list(pool.map(partial(tried, tests=tests, found=found, limit=o.limit), mutants))
    survive = [r for r in rows if not r['found_by']]
    print(f"{len(rows)-len(survive)} of {len(rows)} mutants found by {len(found)} tests in {time.time()-start:.0f} s; survivors:",
          *(r['id'] for r in survive))
    if o.save:
        was = json.loads(o.save.read_text(encoding='utf-8'))['rows'] if o.only and o.save.exists() else []
        new = {r['id']:r for r in was+rows}
        o.save.write_text(json.dumps(dict(seed=o.seed, rows=list(new.values())), indent=1)+'\n', encoding='utf-8')
