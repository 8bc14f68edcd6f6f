//! Kills of a process between any two instructions of a commit or of a recovery.
//!
//! The test starts its own binary as a child process. The child opens a real state directory and
//! performs one action between two signals. The parent single-steps it through the action. Whenever
//! the files have changed, the parent opens a copy of them, as a server would after a kill there.
//!
//! A recovery mostly reads. There the child raises a signal before each store, and the parent steps
//! from each signal far enough to see the store made. A store outside these steps fails the test.

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
use pushpull_optim::optimizer::{Adam, Optimizer, Sgd};
use pushpull_store::arena::{ArenaStorage, Memory, StateDirectory};
use pushpull_store::commit::COMMITTED;
use pushpull_store::layout::PAGE_BYTES;
use pushpull_store::planted::PlantedBugs;
use pushpull_store::testing::store_trace::{self, StoreEvent};
use pushpull_store::testing::test_files::{Content, TestFiles};

use super::crash_life::{CrashScenario, begin_training, numbers};
use super::kept::{FileCopies, PersistentState, open_at, open_on};
use crate::config::PsConfig;
use crate::shard::Shard;
use crate::shard::shard_files::coordinator_record::CoordinatorRecord;
use crate::shard::shard_files::data_record::DataRecord;

/// The environment variable that gives the child its case, bug and directory.
const VARIABLE: &str = "PUSHPULL_STEPPED";
/// The child raises it where stepping begins. Both signals are ignored by an untraced process.
const MARK: Signal = Signal::SIGURG;
/// The child raises it when the action is done.
const END: Signal = Signal::SIGWINCH;
/// The number of instructions to step from each mark in a recovery.
const BURST: usize = 1000;
/// All files are compared each time this many instructions have run, and at the end.
const FULL: usize = 4096;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    /// Applies and commits a whole push.
    Push,
    /// Opens the files.
    Recovery,
}

/// The state of the directory when the child starts.
#[derive(Clone, Copy, Debug)]
enum InitialState {
    /// A whole push of these bytes of the model.
    Whole(u64, usize),
    /// A whole push, killed when half of its commit had been carried out.
    Committed(u64, usize),
    /// A whole push, killed when its rows were changed and not committed.
    Prepared(u64, usize),
}

struct Case {
    name: &'static str,
    action: Action,
    initial: InitialState,
    optimizer: fn() -> Arc<dyn Optimizer>,
    past_cache: bool,
}

const CASES: [Case; 5] = [
    Case {
        name: "a dense push, sgd",
        action: Action::Push,
        initial: InitialState::Whole(0, 616),
        optimizer: || Arc::new(Sgd::new(0.5)),
        past_cache: false,
    },
    Case {
        name: "a dense push past the cache, adam",
        action: Action::Push,
        initial: InitialState::Whole(0, 616),
        optimizer: || Arc::new(Adam::new(0.1)),
        past_cache: true,
    },
    Case {
        name: "a push of a few rows in place, adam",
        action: Action::Push,
        initial: InitialState::Whole(600, 16),
        optimizer: || Arc::new(Adam::new(0.1)),
        past_cache: false,
    },
    Case {
        name: "a recovery that completes a commit",
        action: Action::Recovery,
        initial: InitialState::Committed(0, 616),
        optimizer: || Arc::new(Sgd::new(0.5)),
        past_cache: false,
    },
    Case {
        name: "a recovery that undoes rows",
        action: Action::Recovery,
        initial: InitialState::Prepared(600, 16),
        optimizer: || Arc::new(Adam::new(0.1)),
        past_cache: false,
    },
];

impl Case {
    fn scenario(&self, planted: PlantedBugs) -> CrashScenario {
        let optimizer = (self.optimizer)();
        let past_cache = self.past_cache;
        CrashScenario { optimizer, mixed: false, past_cache, many_clients: false, planted, seed: 0 }
    }

    /// Returns the files that the child finds, and the configuration of their shard.
    fn files(&self) -> (FileCopies, Arc<PsConfig>) {
        let test_files = TestFiles::default();
        // The files are left by a server without planted bugs.
        let (mut world, line) =
            begin_training(&self.scenario(PlantedBugs::default()), test_files.clone());
        let (InitialState::Whole(offset, bytes)
        | InitialState::Committed(offset, bytes)
        | InitialState::Prepared(offset, bytes)) = self.initial;
        let push = world.gradient(line, 1);
        world.push(line, &push, &[(offset, &numbers(bytes / 4, 1.0))]);
        let seen = test_files.clone();
        let config = world.config.clone();
        let (images, left) = std::sync::mpsc::channel();
        let undone = matches!(self.initial, InitialState::Prepared(..));
        let watch = store_trace::watch(move |_| {
            let files = seen.contents();
            let state = |name| files.get(name).and_then(|content: &Content| content.word(4096));
            let committed =
                state("intent").is_some_and(|state| state >> 32 == u64::from(COMMITTED));
            let prepared = state("undo-1") == Some(0xa5a5_5a5a_f00f_0ff0);
            if if undone { prepared && !committed } else { committed } {
                images.send(files).expect("the receiver is alive");
            }
        });
        let whole = test_files.contents();
        world.work();
        drop(watch);
        let images: Vec<FileCopies> = left.into_iter().collect();
        let files = match self.initial {
            InitialState::Whole(..) => whole,
            InitialState::Committed(..) => images[images.len() / 2].clone(),
            InitialState::Prepared(..) => images[images.len() - 1].clone(),
        };
        (without_spare_clients(files), config)
    }
}

/// Cuts the control file to the clients in use. A recovery would spend most of its instructions on
/// the checksums of the others.
fn without_spare_clients(mut files: FileCopies) -> FileCopies {
    let control = files.get_mut("control").expect("every shard has it");
    *control = Content::of(
        &control.to_vec()
            [..(1 + 1 + DataRecord::CELLS + CoordinatorRecord::CELLS + CLIENTS) * PAGE_BYTES],
    );
    files
}

/// The chief and a worker.
const CLIENTS: usize = 2;

fn perform(
    case: &Case,
    storage: ArenaStorage,
    config: &Arc<PsConfig>,
    mark: impl Fn(Signal),
) -> Shard {
    let now = Instant::now();
    match case.action {
        Action::Push => {
            let mut shard = open_at(storage, config, now).expect("the files are sound");
            mark(MARK);
            shard.work(now);
            mark(END);
            shard
        }
        Action::Recovery => {
            mark(MARK);
            let shard = open_at(storage, config, now).expect("the files can be recovered");
            mark(END);
            shard
        }
    }
}

/// The child process. Does nothing when it is run as a test.
#[test]
fn traced_child() {
    let Ok(child_args) = std::env::var(VARIABLE) else { return };
    let mut child_args = child_args.splitn(3, ':');
    let case: usize = child_args.next().and_then(|case| case.parse().ok()).expect("a case");
    let case = &CASES[case];
    let planted = planted_named(child_args.next().expect("a bug"));
    let state = StateDirectory::open(Path::new(child_args.next().expect("a directory"))).unwrap();
    let (_, config) = case.files();
    let config = Arc::new(PsConfig { planted, ..(*config).clone() });
    let storage = ArenaStorage::Folder(state.shard(0).unwrap());
    println!("\nstep {}", gettid());
    std::io::stdin().lock().read_line(&mut String::new()).unwrap();
    let mark = |signal| raise(signal).unwrap();
    let watch = (case.action == Action::Recovery).then(|| store_trace::watch(move |_| mark(MARK)));
    perform(case, storage, &config, mark);
    drop(watch);
}

#[cfg(feature = "planted")]
fn planted_named(name: &str) -> PlantedBugs {
    let bug = pushpull_store::planted::Bug::ALL.iter().find(|bug| format!("{bug:?}") == name);
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

/// The state before and after the action, and the stretches of the files that it writes.
struct Expected {
    before: PersistentState,
    after: PersistentState,
    stretches: Vec<(String, usize, usize)>,
}

/// Performs the action in this process, on test files.
fn rehearse(case: &Case, files: &FileCopies, config: &Arc<PsConfig>) -> Expected {
    let now = Instant::now();
    let kept = |files: &FileCopies| {
        PersistentState::of(
            &open_on(&TestFiles::with(files.clone()), config, now).expect("the files are sound"),
        )
    };
    let test_files = TestFiles::with(files.clone());
    let (sender, events) = std::sync::mpsc::channel();
    let watched = test_files.clone();
    let watch = store_trace::watch(move |event| {
        let (address, start, bytes) = match event {
            StoreEvent::Borrowed { address, start, bytes } => (address, start, bytes),
            StoreEvent::Streaming { address, start, bytes } => (address, start, bytes),
            StoreEvent::Storing { address, start } => (address, start, 8),
            _ => return,
        };
        if let Some(file) = watched.name_of(address) {
            sender.send((file, start, start + bytes)).expect("the receiver is alive");
        }
    });
    let shard = perform(case, ArenaStorage::TestFiles(test_files), config, |_| {});
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
    Expected { before: kept(files), after: PersistentState::of(&shard), stretches }
}

/// Counts of what was checked in one case.
#[derive(Debug, Default)]
struct Figures {
    boundaries: usize,
    states: usize,
    torn: usize,
    wrong_windows: usize,
}

impl Figures {
    fn judge(&mut self, files: FileCopies, config: &Arc<PsConfig>, expected: &Expected) {
        self.states += 1;
        let Ok(shard) = open_on(&TestFiles::with(files), config, Instant::now()) else {
            self.torn += 1;
            return;
        };
        let kept = PersistentState::of(&shard);
        let before = &expected.before;
        let after = &expected.after;
        if kept.values != before.values && kept.values != after.values {
            self.torn += 1;
        } else if kept != *before && kept != *after {
            self.wrong_windows += 1;
        }
    }
}

/// The reason why a traced child has stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stop {
    Instruction,
    Mark,
    End,
}

/// A traced child process. It is killed when this value is dropped.
struct Stepped {
    child: Child,
    thread: Pid,
}

impl Drop for Stepped {
    fn drop(&mut self) {
        // The child may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Stepped {
    /// Starts the child and runs it to its first mark. `None` where tracing is not permitted.
    fn start(case: usize, planted: PlantedBugs, directory: &Path) -> Option<Stepped> {
        let child_args = format!("{case}:{}:{}", name_of(planted), directory.display());
        let name = "shard::tests::stepping::traced_child";
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--nocapture"])
            .env(VARIABLE, child_args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut lines = lines.map_while(Result::ok);
        let thread = lines.find_map(|line| line.strip_prefix("step ")?.parse().ok());
        let thread = Pid::from_raw(thread.expect("the child prints the thread to step"));
        // Drains the rest of its output, so that the child never blocks on a full pipe.
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

    /// Waits for the child to stop and returns its signal. `None` if it has ended.
    fn wait(&self) -> Option<Signal> {
        match waitpid(self.thread, Some(WaitPidFlag::__WALL)).unwrap() {
            WaitStatus::Stopped(_, signal) => Some(signal),
            _ => None,
        }
    }

    /// Runs the child for one instruction, or to its next mark.
    fn resume(&self, one: bool) -> Stop {
        let mut signal = None;
        loop {
            match one {
                true => ptrace::step(self.thread, signal).unwrap(),
                false => ptrace::cont(self.thread, signal).unwrap(),
            }
            match self.wait() {
                Some(Signal::SIGTRAP) => return Stop::Instruction,
                Some(MARK) => return Stop::Mark,
                Some(END) => return Stop::End,
                // Any other signal is delivered to the child.
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

/// Steps through one case. `None` where tracing is not permitted.
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
    let copy = || -> FileCopies {
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
    let burst = if case.action == Action::Push { usize::MAX } else { BURST };
    let mut left = burst;
    loop {
        let stop = stepped.resume(left > 0);
        let has_changed = changed(&mut last);
        assert!(left > 0 || !has_changed, "a store outside the stepped instructions");
        left = if stop == Stop::Mark { burst } else { left.saturating_sub(1) };
        figures.boundaries += 1;
        if has_changed {
            all = copy();
            figures.judge(all.clone(), &config, &expected);
        } else if figures.boundaries % FULL == 0 || stop == Stop::End {
            assert!(copy() == all, "a store that the store trace does not contain");
        }
        if stop == Stop::End {
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

/// Steps through all cases and prints the counts.
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
        assert!(states > 1, "the files never changed");
        assert_eq!((torn, wrong_windows), (0, 0), "{}", case.name);
    }
}

#[test]
fn a_kill_between_any_two_instructions_tears_nothing() {
    suite(PlantedBugs::default());
}
