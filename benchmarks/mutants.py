"""Which small mistakes in the package do the tests find? `python benchmarks/mutants.py -j 2 --save`

Each mutant is a copy of the package with one change: another comparison, a constant that is larger by one, `or` for `and`,
a statement left out. It runs the tests that execute the changed line, the fastest first, until one fails.
Mutants are drawn at random, always the same ones, from each module in proportion to its lines. Needs pytest-cov and pytest-xdist."""
import argparse,ast,hashlib,json,os,random,re,shutil,subprocess,sys,tempfile,time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

root = Path(__file__).resolve().parents[1]
package,results = root/'fastai_accum',root/'benchmarks'/'results'/'mutants.json'
pairs = 'Lt LtE, Gt GtE, Eq NotEq, Is IsNot, In NotIn, Add Sub, Mult Div, And Or'
swapped = {getattr(ast, a):getattr(ast, b) for o in pairs.split(', ') for a,b in (o.split(),o.split()[::-1])}
left_out = ast.Expr,ast.AugAssign,ast.Raise,ast.Delete,ast.Continue,ast.Break
never = ast.Import,ast.ImportFrom,ast.JoinedStr,ast.Global,ast.Nonlocal   # a text is only a message
anywhere = (1,10**6),

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

def walk(o, stmt=None, at=anywhere):
    "Each mistake in `o`, and the lines that run it; what runs at import is tested by what runs its function, class or module"
    if isinstance(o, never) or isinstance(o, ast.Expr) and isinstance(o.value, ast.Constant): return   # or a docstring
    if isinstance(o, ast.stmt): stmt = o
    last = max(stmt.lineno, stmt.body[0].lineno-1) if hasattr(stmt, 'body') else getattr(stmt, 'end_lineno', 0)
    yield from ((old,new,((stmt.lineno,last),) if at=='body' else at) for old,new in mistakes(o))
    if isinstance(o, ast.Raise) or getattr(getattr(o, 'func', None), 'attr', '')=='warn': return
    is_function = isinstance(o, (ast.FunctionDef,ast.AsyncFunctionDef))
    if isinstance(o, ast.ClassDef): at = (o.lineno,o.end_lineno),*anywhere
    for name,vs in ast.iter_fields(o):
        if name in ('annotation','returns','decorator_list'): continue
        inside = at if not is_function else 'body' if name=='body' else ((o.body[0].lineno,o.end_lineno),)
        for v in vs if isinstance(vs, list) else [vs]:
            if isinstance(v, ast.AST): yield from walk(v, stmt, inside)

def mutated(source, old, new):
    "`source` with `new` for `old`; the rest stays as it is, with its comments"
    lines = source.encode().split(b'\n')
    a,b = (sum(len(o)+1 for o in lines[:n-1])+col for n,col in ((old.lineno,old.col_offset), (old.end_lineno,old.end_col_offset)))
    return (source.encode()[:a] + ast.unparse(new).join('()' if isinstance(old, ast.expr) else ('','')).encode()
            + source.encode()[b:]).decode()

def draw(n):
    "About `n` mutants, always the same, from each module in proportion to its lines"
    files = [o for o in sorted(package.rglob('*.py')) if o.name not in ('__init__.py','_modidx.py','all.py')]
    sources = {o.relative_to(package).as_posix():o.read_text(encoding='utf-8') for o in files}
    lines = {k:sum(bool(o.strip()) for o in s.split('\n')) for k,s in sources.items()}
    for module,source in sources.items():
        found,k = [*walk(ast.parse(source))],max(1, round(n*lines[module]/sum(lines.values())))
        for old,new,at in random.Random(module).sample(found, min(k, len(found))):
            was,now = (' '.join(ast.unparse(o).split()) for o in (old,new))
            yield dict(id=f'{module}:{old.lineno}:{old.col_offset}:{now}'[:60].replace(' ', ''), module=module, line=old.lineno,
                       what=f'{was} -> {now}', at=at, source=mutated(source, old, new))

def pytest(tests, path, *args, limit=None, **env):
    "Run pytest with the package in `path`; its exit status and output, or `None` if it takes more than `limit` seconds"
    paths = os.pathsep.join([str(path), os.environ.get('PYTHONPATH', ''), str(Path(__file__).parent)])
    cmd = [sys.executable, '-P', '-m', 'pytest', '-q', '--tb=no', '-p', 'no:cacheprovider', *map(str, args)]
    env = {**os.environ, 'PYTHONPATH':paths, 'OMP_NUM_THREADS':'1', 'PYTHONDONTWRITEBYTECODE':'1', **env}
    p = subprocess.Popen(cmd, cwd=tests.parent, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                         encoding='utf-8', errors='replace', start_new_session=True)
    try: return p.communicate(timeout=limit)[0],p.wait()
    except subprocess.TimeoutExpired: return None
    finally:
        with suppress(ProcessLookupError): os.killpg(p.pid, 9)   # and what tests have started

def pytest_runtest_logreport(report):
    "pytest calls this, as a plugin: note what each part of a test took, and how it ended"
    if 'PYTEST_XDIST_WORKER' in os.environ: return
    with open(os.environ['MUTANTS_LOG'], 'a', encoding='utf-8') as f:
        f.write(json.dumps([report.nodeid, report.outcome, report.duration])+'\n')

def recorded(tests, j, files):
    "What the tests that pass run, measured once: `{test: (seconds, {module: lines})}`"
    sources = b''.join(o.read_bytes() for d in (package,tests) for o in sorted(d.rglob('*.py')))
    state,cache = ' '.join(files)+hashlib.sha256(sources).hexdigest(),tests/'.mutants.json'
    if cache.exists() and (was := json.loads(cache.read_text(encoding='utf-8')))['state']==state: return was['tests']
    from coverage import CoverageData
    with tempfile.TemporaryDirectory() as d:
        log,data = Path(d)/'log',CoverageData(f'{d}/coverage')
        args = ['-p', 'mutants', '-n', j, f'--cov={package}', '--cov-context=test', '--cov-report=', *(files or [tests])]
        args += ['--deselect', 'tests/test_exact.py::test_ctrl_c_at_any_time']   # Python 3.11 may hang on a signal while it traces a thread
        print(pytest(tests, root, *args, MUTANTS_LOG=str(log), COVERAGE_FILE=data.data_filename())[0].strip().split('\n')[-1])
        seconds,failed,lines = defaultdict(float),set(),defaultdict(lambda: defaultdict(list))
        for test,outcome,took in map(json.loads, log.read_text(encoding='utf-8').splitlines()):
            seconds[test] += took
            if outcome!='passed': failed.add(test)
        data.read()
        for f in data.measured_files():
            for line,contexts in data.contexts_by_lineno(f).items():
                for o in {o.rpartition('|')[0] for o in contexts}: lines[o][Path(f).relative_to(package).as_posix()].append(line)
    res = {o:(round(seconds[o], 2), lines[o]) for o in seconds if o not in failed}
    cache.write_text(json.dumps(dict(state=state, tests=res)), encoding='utf-8')
    return res

def covers(found, mutant):
    "The tests that run the changed line, the fastest first; what other processes run is not measured"
    def runs(a, b): return [o for o,(_,ran) in found.items() if any(a<=line<=b for line in ran.get(mutant['module'], []))]
    several = [o for o in found if 'test_processes' in o]
    res = next(filter(None, (runs(*o) for o in mutant['at'])), several)
    if mutant['module']=='processes.py': res = {*res,*several}
    return sorted(res, key=lambda o: found[o][0])

def tried(mutant, tests, found, limit):
    "The row of the table for `mutant`: the test that finds it, or how many it survives"
    every,ids,took = covers(found, mutant),[],0.
    for o in every:
        if ids and took+found[o][0]>limit: break
        ids.append(o); took += found[o][0]
    said,status = f'survives {len(ids)} of {len(every)} tests',0
    if ids:
        with tempfile.TemporaryDirectory() as d:
            shutil.copytree(package, f'{d}/{package.name}', ignore=shutil.ignore_patterns('__pycache__'))
            Path(d, package.name, mutant['module']).write_text(mutant['source'], encoding='utf-8')
            Path(d, 'ids').write_text('\n'.join(ids), encoding='utf-8')
            out,status = pytest(tests, d, '-x', '-rfE', f'@{d}/ids', limit=60+2*took) or ('ERROR it takes too long', -1)
        if status: said = [*re.findall('^(?:FAILED|ERROR) (.*?)(?: - |$)', out, re.M), f'pytest ends with {status}'][0]
    print(f"{mutant['id']}  {mutant['what']}\n    {said}", flush=True)
    return {k:mutant[k] for k in ('id','module','line','what')} | dict(survives=not status, tests=said)

if __name__=='__main__':
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('files', nargs='*', help='files of tests; all of them if there are none')
    p.add_argument('-n', type=int, default=160, help='about how many mutants')
    p.add_argument('-j', type=int, default=2, help='processes')
    p.add_argument('--limit', type=int, default=300, help='seconds of tests for each mutant')
    p.add_argument('--tests', type=Path, default=root/'tests', help='the folder of tests, which may be of another checkout')
    p.add_argument('--only', nargs='+', help='the ids of the mutants to try')
    p.add_argument('--save', action='store_true', help=f'write {results.relative_to(root)}')
    o,start = p.parse_args(),time.time()
    found = recorded(o.tests.resolve(), o.j, o.files)
    mutants = [m for m in draw(o.n) if not o.only or m['id'] in o.only]
    with ThreadPoolExecutor(o.j) as pool:
        rows = list(pool.map(lambda m: tried(m, o.tests.resolve(), found, o.limit), mutants))
    survivors = [r['id'] for r in rows if r['survives']]
    print(f'{len(found)} tests find all of {len(rows)} mutants but {len(survivors)}, in {time.time()-start:.0f} s:', *survivors)
    was = json.loads(results.read_text(encoding='utf-8')) if results.exists() else []
    table = [*{r['id']:r for r in was*bool(o.only)+rows}.values()]
    if o.save: results.write_text(json.dumps(table, indent=1)+'\n', encoding='utf-8')
    sys.exit(bool(was) and not o.only and len(survivors)>sum(r['survives'] for r in was))   # at night, more survive than before
