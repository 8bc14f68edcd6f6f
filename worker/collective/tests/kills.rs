//! Kills ranks while they train, and checks that every other rank names them and goes on.
//!
//! `PUSHPULL_RING_KILLS=100 cargo test -p pushpull-collective --test kills` kills a hundred.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::io::{BufRead, BufReader};
use std::os::unix::process::parent_id;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use pushpull_collective::{Launch, Reduction, RingConfig, RingError, blocking};

const RANKS: u32 = 4;
const STEPS: u64 = 3000;
/// A killed process closes its connections, so nobody waits for the lease.
const LEASE: Duration = Duration::from_secs(5);

/// Trains as one rank: each step adds the mean of ones, so the value is the number of steps.
#[test]
#[ignore = "a process of the tests below"]
fn rank_process() {
    let launch = Launch::from_lookup(|name| std::env::var(name).ok()).unwrap();
    let folder = PathBuf::from(std::env::var_os("PUSHPULL_TEST_FOLDER").unwrap());
    let lease = std::env::var("PUSHPULL_TEST_LEASE_MS").unwrap().parse().unwrap();
    let lease = Duration::from_millis(lease);
    let config = RingConfig::new(launch.parent_process(parent_id())).folder(folder).lease(lease);
    let mut ring = blocking::Ring::join(config.join_timeout(Duration::from_secs(30))).unwrap();
    let mut state = [0.0_f64; 2];
    let mut gradients = vec![0.0_f32; 30_000];
    println!("joined");
    while state[0] < STEPS as f64 {
        gradients.fill(1.0);
        match ring.all_reduce(&mut gradients, Reduction::Mean) {
            Ok(()) => {
                state[0] += 1.0;
                state[1] += f64::from(gradients[29_999]);
                if state[0] == 10.0 {
                    println!("trains");
                }
            }
            Err(RingError::Lost { rank, .. }) => {
                println!("lost {rank}");
                if let Err(RingError::Refused { refusal }) = ring.shrink() {
                    return println!("refused {refusal}");
                }
                // Some ranks have ended the last step, and some have not.
                ring.broadcast(&mut state, 0).unwrap();
            }
            Err(RingError::Fenced { .. }) => return println!("fenced"),
            Err(error) => panic!("{error}"),
        }
    }
    ring.barrier().unwrap();
    println!("done {} of {}", state[1], ring.size());
    ring.leave();
}

/// A rank and the lines that it prints.
struct RankProcess {
    child: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl RankProcess {
    fn start(rank: u32, folder: &Path, lease: Duration) -> RankProcess {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["rank_process", "--exact", "--ignored", "--nocapture", "--test-threads=1"])
            .env("PUSHPULL_RANK", rank.to_string())
            .env("PUSHPULL_SIZE", RANKS.to_string())
            .env("PUSHPULL_TEST_FOLDER", folder)
            .env("PUSHPULL_TEST_LEASE_MS", lease.as_millis().to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        RankProcess { child, lines }
    }

    /// Reads until a line that has one of these words. Returns it from there on.
    fn until(&mut self, words: &[&str]) -> String {
        for line in &mut self.lines {
            let line = line.unwrap();
            let found = words.iter().find_map(|word| line.find(word));
            if let Some(at) = found {
                return line[at..].to_owned();
            }
        }
        "the end of its output".to_owned()
    }
}

impl Drop for RankProcess {
    fn drop(&mut self) {
        // It has ended, or a test has failed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Kills one rank. Returns how long the slowest of the others took to hear of it.
fn kill_one(round: u64, random: u64) -> Duration {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let mut ranks: Vec<RankProcess> =
        (0..RANKS).map(|rank| RankProcess::start(rank, folder.path(), LEASE)).collect();
    for rank in &mut ranks {
        assert_eq!(rank.until(&["trains"]), "trains", "round {round}");
    }
    let victim = (random % u64::from(RANKS)) as usize;
    // The kill meets another moment of a step in each round.
    std::thread::sleep(Duration::from_micros(random >> 8 & 0x3fff));
    let begin = Instant::now();
    let mut killed = ranks.remove(victim);
    killed.child.kill().unwrap();
    killed.child.wait().unwrap();
    for rank in &mut ranks {
        let named = rank.until(&["lost", "done"]);
        assert_eq!(named, format!("lost {victim}"), "round {round}, random {random:#x}");
    }
    let heard = begin.elapsed();
    assert!(heard < LEASE, "round {round}, random {random:#x}: heard after {heard:?}");
    for rank in &mut ranks {
        let expected = format!("done {STEPS} of {}", RANKS - 1);
        assert_eq!(rank.until(&["done"]), expected, "round {round}, random {random:#x}");
        assert!(rank.child.wait().unwrap().success(), "round {round}, random {random:#x}");
    }
    heard
}

#[test]
fn a_killed_rank_is_named_and_the_others_end_right() {
    let kills = std::env::var("PUSHPULL_RING_KILLS").map_or(3, |text| text.parse().unwrap());
    let random = |round: u64| {
        let mut hasher = RandomState::new().build_hasher();
        hasher.write_u64(round);
        hasher.finish()
    };
    let heard = (0..kills).map(|round| kill_one(round, random(round)));
    let slowest = heard.max().unwrap_or_default();
    println!(
        "{kills} kills: the slowest rank heard after {slowest:?}, within a lease of {LEASE:?}"
    );
}

#[test]
fn a_stopped_rank_is_lost_and_finds_itself_fenced() {
    let lease = Duration::from_millis(1500);
    // One of them has the rendezvous.
    for victim in 0..2 {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let start = |rank| RankProcess::start(rank, folder.path(), lease);
        let mut ranks: Vec<RankProcess> = (0..RANKS).map(start).collect();
        for rank in &mut ranks {
            assert_eq!(rank.until(&["trains"]), "trains");
        }
        let mut stopped = ranks.remove(victim);
        let pid = rustix::process::Pid::from_child(&stopped.child);
        rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
        for rank in &mut ranks {
            assert_eq!(rank.until(&["lost", "done"]), format!("lost {victim}"));
            let expected = format!("done {STEPS} of {}", RANKS - 1);
            assert_eq!(rank.until(&["done"]), expected);
        }
        rustix::process::kill_process(pid, rustix::process::Signal::CONT).unwrap();
        // With the rendezvous in its process it finds all others lost. It goes on without them only
        // with more than half of the ring.
        let found = stopped.until(&["fenced", "refused", "done"]);
        let is_refused = found.starts_with("refused") && found.contains("half of the 4");
        assert!(found == "fenced" || is_refused, "rank {victim}: {found}");
    }
}
