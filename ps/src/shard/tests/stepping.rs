//! A process killed between any two instructions of a commit, and of a recovery.
//!
//! The test starts its own binary again as a child, which opens a real state directory and does one
//! thing between two marks. The parent steps it through that, one instruction at a time; whenever
//! the files have changed it opens a copy of them, as whoever comes after a kill there would.
//!
//! A recovery mostly reads. There the child marks each store that it is about to make, and the parent
//! steps from each mark far enough to see it made; what changes the files elsewhere is found.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Instant;

use nix::errno::Errno;
use nix::sys::ptrace;
use nix::sys::signal::{Signal, raise};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{Pid, gettid};

use super::crash_life::{Life, begin_training, numbers};
use super::kept::{Files, PooledBuffers, open_at, open_on};
use crate::arena::shelf::{Content, Shelf};
use crate::arena::store_trace::{self, Event};
use crate::arena::{Memory, Place, StateDirectory};
use crate::commit::COMMITTED;
use crate::config::PsConfig;
use crate::layout::PAGE_BYTES;
use crate::optimizer::{Adam, Optimizer, Sgd};
use crate::planted::PlantedBugs;
use crate::shard::Shard;

/// Tells the child its case, bug and directory.
const VARIABLE: &str = "PUSHPULL_STEPPED";
/// From here on it is stepped through. Like the other, ignored by a process that nobody traces.
const MARK: Signal = Signal::SIGURG;
/// It is done.
const END: Signal = Signal::SIGWINCH;
/// In a recovery, so many instructions are stepped from each mark on.
const BURST: usize = 1000;
/// All of the files are compared at every so many instructions, and at the end.
const FULL: usize = 4096;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Deed {
    /// Applies and commits the push that lies whole.
    Push,
    /// Opens what is there.
    Recovery,
}

/// What lies in the directory when the child comes.
#[derive(Clone, Copy, Debug)]
enum Left {
    /// A whole push of these bytes of the model.
    Whole(u64, usize),
    /// The same, killed when half of its commit was carried out.
    Committed(u64, usize),
    /// The same, killed when its rows were changed and not committed.
    Prepared(u64, usize),
}

struct Case {
    name: &'static str,
    deed: Deed,
    left: Left,
    optimizer: fn() -> Arc<dyn Optimizer>,
    past_cache: bool,
}

const CASES: [Case; 5] = [
    Case {
        name: "a dense push, sgd",
        deed: Deed::Push,
        left: Left::Whole(0, 616),
        optimizer: || Arc::new(Sgd::new(0.5)),
        past_cache: false,
    },
    Case {
        name: "a dense push past the cache, adam",
        deed: Deed::Push,
        left: Left::Whole(0, 616),
        optimizer: || Arc::new(Adam::new(0.1)),
        past_cache: true,
    },
    Case {
        name: "a push of a few rows in place, adam",
        deed: Deed::Push,
        left: Left::Whole(600, 16),
        optimizer: || Arc::new(Adam::new(0.1)),
        past_cache: false,
    },
    Case {
        name: "a recovery that does a commit again",
        deed: Deed::Recovery,
        left: Left::Committed(0, 616),
        optimizer: || Arc::new(Sgd::new(0.5)),
        past_cache: false,
    },
    Case {
        name: "a recovery that puts rows back",
        deed: Deed::Recovery,
        left: Left::Prepared(600, 16),
        optimizer: || Arc::new(Adam::new(0.1)),
        past_cache: false,
    },
];

impl Case {
    fn life(&self, planted: PlantedBugs) -> Life {
        let (optimizer, past_cache) = ((self.optimizer)(), self.past_cache);
        Life { optimizer, mixed: false, past_cache, crowd: false, planted, seed: 0 }
    }

    /// What the child finds.
    fn files(&self) -> (Files, Arc<PsConfig>) {
        let shelf = Shelf::default();
        // Whatever is planted later, this was left by a sound server.
        let (mut world, line) = begin_training(&self.life(PlantedBugs::default()), shelf.clone());
        let (Left::Whole(offset, bytes)
        | Left::Committed(offset, bytes)
        | Left::Prepared(offset, bytes)) = self.left;
        let push = world.gradient(line, 1);
        world.push(line, &push, &[(offset, &numbers(bytes / 4, 1.0))]);
        let (seen, config) = (shelf.clone(), world.config.clone());
        let (images, left) = std::sync::mpsc::channel();
        let undone = matches!(self.left, Left::Prepared(..));
        let watch = store_trace::watch(move |_| {
            let files = seen.contents();
            let state = |name| files.get(name).and_then(|content: &Content| content.word(4096));
            let committed =
                state("intent").is_some_and(|state| state >> 32 == u64::from(COMMITTED));
            let prepared = state("undo-1") == Some(0xa5a5_5a5a_f00f_0ff0);
            if if undone { prepared && !committed } else { committed } {
                images.send(files).expect("it is received below");
            }
        });
        let whole = shelf.contents();
        world.work();
        drop(watch);
        let images: Vec<Files> = left.into_iter().collect();
        let files = match self.left {
            Left::Whole(..) => whole,
            Left::Committed(..) => images[images.len() / 2].clone(),
            Left::Prepared(..) => images[images.len() - 1].clone(),
        };
        (without_push_slot(files), config)
    }
}

/// The files without the control words that are only room for more clients: a recovery would spend
/// most of its instructions on their checksums.
fn without_push_slot(mut files: Files) -> Files {
    let control = files.get_mut("control").expect("every shard has it");
    *control = Content::of(&control.to_vec()[..(1 + 1 + CLIENTS) * PAGE_BYTES]);
    files
}

/// The chief and a worker.
const CLIENTS: usize = 2;

fn do_deed(case: &Case, place: Place, config: &Arc<PsConfig>, mark: impl Fn(Signal)) -> Shard {
    let now = Instant::now();
    match case.deed {
        Deed::Push => {
            let mut shard = open_at(place, config, now).expect("it is whole");
            mark(MARK);
            shard.work(now);
            mark(END);
            shard
        }
        Deed::Recovery => {
            mark(MARK);
            let shard = open_at(place, config, now).expect("it can be recovered");
            mark(END);
            shard
        }
    }
}

/// The child.
#[test]
fn is_stepped_through() {
    let Ok(told) = std::env::var(VARIABLE) else { return };
    let mut told = told.splitn(3, ':');
    let case: usize = told.next().and_then(|case| case.parse().ok()).expect("a case");
    let (case, planted) = (&CASES[case], planted_named(told.next().expect("a bug")));
    let state = StateDirectory::open(Path::new(told.next().expect("a directory"))).unwrap();
    let (_, config) = case.files();
    let config = Arc::new(PsConfig { planted, ..(*config).clone() });
    let place = Place::Folder(state.shard(0).unwrap());
    println!("\nstep {}", gettid());
    std::io::stdin().lock().read_line(&mut String::new()).unwrap();
    let mark = |signal| raise(signal).unwrap();
    let watch = (case.deed == Deed::Recovery).then(|| store_trace::watch(move |_| mark(MARK)));
    do_deed(case, place, &config, mark);
    drop(watch);
}

#[cfg(feature = "planted")]
fn planted_named(name: &str) -> PlantedBugs {
    let bug = crate::planted::Bug::ALL.iter().find(|bug| format!("{bug:?}") == name);
    bug.map_or_else(PlantedBugs::default, |&bug| PlantedBugs::with(bug))
}

#[cfg(feature = "planted")]
fn name_of(planted: PlantedBugs) -> String {
    planted.bug().map_or_else(String::new, |bug| format!("{bug:?}"))
}

#[cfg(not(feature = "planted"))]
fn planted_named(_name: &str) -> PlantedBugs {
    PlantedBugs::default()
}

#[cfg(not(feature = "planted"))]
fn name_of(_planted: PlantedBugs) -> String {
    String::new()
}

/// What must have been kept before and after, and the stretches of the files that are written.
struct Expected {
    before: PooledBuffers,
    after: PooledBuffers,
    stretches: Vec<(String, usize, usize)>,
}

/// Does the deed in this process, on a shelf.
fn rehearse(case: &Case, files: &Files, config: &Arc<PsConfig>) -> Expected {
    let now = Instant::now();
    let kept = |files: &Files| {
        PooledBuffers::of(&open_on(&Shelf::with(files.clone()), config, now).expect("it is sound"))
    };
    let shelf = Shelf::with(files.clone());
    let (told, events) = std::sync::mpsc::channel();
    let watched = shelf.clone();
    let watch = store_trace::watch(move |event| {
        let (address, start, bytes) = match event {
            Event::Shared { address, start, bytes } => (address, start, bytes),
            Event::Streaming { address, start, bytes } => (address, start, bytes),
            Event::Storing { address, start } => (address, start, 8),
            _ => return,
        };
        if let Some(file) = watched.name_of(address) {
            told.send((file, start, start + bytes)).expect("it is received below");
        }
    });
    let shard = do_deed(case, Place::Shelf(shelf), config, |_| {});
    drop(watch);
    let mut written: Vec<(String, usize, usize)> = events.into_iter().collect();
    written.sort();
    let mut stretches: Vec<(String, usize, usize)> = Vec::new();
    for (file, start, end) in written {
        match stretches.last_mut() {
            // One comparison of a longer stretch is cheaper than two.
            Some(last) if last.0 == file && start <= last.2 + 256 => last.2 = last.2.max(end),
            _ => stretches.push((file, start, end)),
        }
    }
    Expected { before: kept(files), after: PooledBuffers::of(&shard), stretches }
}

/// What was seen of one case.
#[derive(Debug, Default)]
struct Figures {
    boundaries: usize,
    states: usize,
    torn: usize,
    wrong_windows: usize,
}

impl Figures {
    fn judge(&mut self, files: Files, config: &Arc<PsConfig>, expected: &Expected) {
        self.states += 1;
        let Ok(shard) = open_on(&Shelf::with(files), config, Instant::now()) else {
            self.torn += 1;
            return;
        };
        let kept = PooledBuffers::of(&shard);
        let (before, after) = (&expected.before, &expected.after);
        if kept.values != before.values && kept.values != after.values {
            self.torn += 1;
        } else if kept != *before && kept != *after {
            self.wrong_windows += 1;
        }
    }
}

/// Where a traced child has stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    Instruction,
    Mark,
    End,
}

/// A traced child, which dies with this.
struct Stepped {
    child: Child,
    thread: Pid,
}

impl Drop for Stepped {
    fn drop(&mut self) {
        // It may be gone.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Stepped {
    /// Starts the child and lets it run to its first mark; `None` where that is not permitted.
    fn start(case: usize, planted: PlantedBugs, directory: &Path) -> Option<Stepped> {
        let told = format!("{case}:{}:{}", name_of(planted), directory.display());
        let name = "shard::tests::stepping::is_stepped_through";
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--nocapture"])
            .env(VARIABLE, told)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut lines = lines.map_while(Result::ok);
        let thread = lines.find_map(|line| line.strip_prefix("step ")?.parse().ok());
        let thread = Pid::from_raw(thread.expect("the child says which thread is to be stepped"));
        // What else it says is for nobody, but it must be able to say it.
        std::thread::spawn(move || lines.for_each(drop));
        let mut stdin = child.stdin.take().unwrap();
        let stepped = Stepped { child, thread };
        match ptrace::attach(thread) {
            Err(Errno::EPERM | Errno::ENOSYS) => return None,
            attached => attached.unwrap(),
        }
        assert_eq!(stepped.wait(), Some(Signal::SIGSTOP));
        ptrace::cont(thread, None).unwrap();
        stdin.write_all(b"go\n").unwrap();
        assert_eq!(stepped.wait(), Some(MARK));
        Some(stepped)
    }

    /// The signal that it is stopped with; `None` if it has ended.
    fn wait(&self) -> Option<Signal> {
        match waitpid(self.thread, Some(WaitPidFlag::__WALL)).unwrap() {
            WaitStatus::Stopped(_, signal) => Some(signal),
            _ => None,
        }
    }

    /// Lets it do one instruction, or run to its next mark.
    fn go_on(&self, one: bool) -> At {
        let mut signal = None;
        loop {
            match one {
                true => ptrace::step(self.thread, signal).unwrap(),
                false => ptrace::cont(self.thread, signal).unwrap(),
            }
            match self.wait() {
                Some(Signal::SIGTRAP) => return At::Instruction,
                Some(MARK) => return At::Mark,
                Some(END) => return At::End,
                // Somebody else's: it is passed on.
                Some(other) => signal = Some(other),
                None => panic!("the child has ended"),
            }
        }
    }

    fn finish(mut self) {
        ptrace::detach(self.thread, None).unwrap();
        assert!(self.child.wait().unwrap().success());
    }
}

/// Steps through one case; `None` where that is not permitted.
fn step_through(index: usize, planted: PlantedBugs) -> Option<Figures> {
    let case = &CASES[index];
    let (files, sound) = case.files();
    let expected = rehearse(case, &files, &sound);
    let config = Arc::new(PsConfig { planted, ..(*sound).clone() });
    let directory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    let folder = directory.path().join("shard-0");
    std::fs::create_dir(&folder).unwrap();
    for (name, content) in &files {
        std::fs::write(folder.join(name), content.to_vec()).unwrap();
    }
    let stepped = Stepped::start(index, planted, directory.path())?;
    let maps: BTreeMap<String, Memory> = files.keys().map(|name| map(&folder, name)).collect();
    let copy = || -> Files {
        maps.iter().map(|(name, map)| (name.clone(), Content::of(map.bytes()))).collect()
    };
    let changed = |last: &mut [Vec<u8>]| {
        let mut changed = false;
        for ((name, start, end), last) in expected.stretches.iter().zip(last) {
            let now = &maps[name].bytes()[*start..*end];
            if now != last {
                last.copy_from_slice(now);
                changed = true;
            }
        }
        changed
    };
    let mut last: Vec<Vec<u8>> = (expected.stretches.iter())
        .map(|(name, start, end)| maps[name].bytes()[*start..*end].to_vec())
        .collect();
    let mut all = copy();
    let mut figures = Figures::default();
    figures.judge(all.clone(), &config, &expected);
    let burst = if case.deed == Deed::Push { usize::MAX } else { BURST };
    let mut left = burst;
    loop {
        let at = stepped.go_on(left > 0);
        let has_changed = changed(&mut last);
        assert!(left > 0 || !has_changed, "a store that was not stepped through");
        left = if at == At::Mark { burst } else { left.saturating_sub(1) };
        figures.boundaries += 1;
        if has_changed {
            all = copy();
            figures.judge(all.clone(), &config, &expected);
        } else if figures.boundaries % FULL == 0 || at == At::End {
            assert!(copy() == all, "a store that the witness was not told of");
        }
        if at == At::End {
            break;
        }
    }
    drop(maps);
    stepped.finish();
    Some(figures)
}

fn map(folder: &Path, name: &str) -> (String, Memory) {
    let file = std::fs::File::options().read(true).write(true).open(folder.join(name)).unwrap();
    (name.to_owned(), Memory::of_file(file).unwrap())
}

/// All cases. Prints what was seen.
pub(super) fn suite(planted: PlantedBugs) {
    for (index, case) in CASES.iter().enumerate() {
        let start = Instant::now();
        let Some(figures) = step_through(index, planted) else {
            println!("SKIPPED: stepping through processes is not permitted here");
            return;
        };
        let Figures { boundaries, states, torn, wrong_windows } = figures;
        println!(
            "{}: {boundaries} boundaries, {states} distinct states, torn {torn}, wrong windows \
             {wrong_windows}, in {:.1} s",
            case.name,
            start.elapsed().as_secs_f64()
        );
        assert!(states > 1, "nothing was seen");
        assert_eq!((torn, wrong_windows), (0, 0), "{}", case.name);
    }
}

#[test]
fn a_kill_between_any_two_instructions_tears_nothing() {
    suite(PlantedBugs::default());
}
