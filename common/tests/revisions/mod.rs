//! The list of revisions: a change of golden bytes needs a new line, never an edit.
//!
//! A line has a number, a digest and a reason. The digest covers the golden tables and all lines
//! before, so an edited line makes all later digests wrong. In a checkout of git the list is also
//! compared with each of its earlier states: every one must be the beginning of the next.

use std::path::Path;
use std::process::Command;

use sha2::{Digest, Sha256};

/// The names in the tables that have changed since the newest revision, each with the name that its
/// digest covers. A new name is no new byte. The list is empty after the next revision.
const RENAMED: [(&str, &str); 0] = [];

/// The path of the list in the package.
const PATH: &str = "src/protocol/revisions.txt";

/// Checks the list against the tables and its history. With `PUSHPULL_BLESS`, appends a revision
/// first if the tables are not those of the newest one.
pub(crate) fn check(tables: &[String]) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(PATH);
    let history = history();
    if history.is_empty() {
        println!("SKIPPED: there is no history of git to compare {PATH} with");
    }
    let mut now = std::fs::read_to_string(&path).expect("cannot read the list of revisions");
    if let Some(reason) = std::env::var_os("PUSHPULL_BLESS") {
        let committed = history.last().map_or(&now, |newest| newest);
        if digest(tables, &before_last(&now)) != last(&now).1 {
            let reason = reason.to_string_lossy();
            assert!(reason.len() > 1, "say why the bytes change: PUSHPULL_BLESS=\"the reason\"");
            // A revision that is not committed yet is replaced.
            now = appended(committed, tables, &reason);
            std::fs::write(&path, &now).expect("cannot write the list of revisions");
            println!("blessed {}: {}", path.display(), last(&now).0);
        }
    }
    if let Some(fault) = fault(&now, &history, tables) {
        panic!("{PATH}: {fault}\nSee \"How to change a message\" in CONTRIBUTING.md.");
    }
}

/// Returns what is wrong with the list: its newest line is not that of the tables, or an earlier
/// state of it, in `history` from the oldest on, is not its beginning.
pub(crate) fn fault(now: &str, history: &[String], tables: &[String]) -> Option<String> {
    let (line, found) = last(now);
    if digest(tables, &before_last(now)) != found {
        return Some(format!("the newest revision has other bytes than the code: {line:?}"));
    }
    let states: Vec<String> =
        history.iter().map(String::as_str).chain([now]).map(without_comments).collect();
    let edited = states.windows(2).find(|pair| !pair[1].starts_with(&pair[0]))?;
    let lines = edited[0].lines().zip(edited[1].lines().chain(std::iter::repeat("")));
    let mut differing = lines.filter(|(before, after)| before != after);
    let (before, after) = differing.next().unwrap_or(("its last line", "less"));
    Some(format!("the list may only be appended to, but {before:?} has become {after:?}"))
}

/// Returns the list with one more revision, for these tables.
pub(crate) fn appended(list: &str, tables: &[String], reason: &str) -> String {
    let number = 1 + list.lines().filter(|line| !line.starts_with('#')).count();
    format!("{list}{number} {} {reason}\n", digest(tables, &without_comments(list)))
}

/// Returns the last line and its digest.
fn last(list: &str) -> (&str, &str) {
    let line = list.lines().last().unwrap_or_default();
    (line, line.split(' ').nth(1).unwrap_or_default())
}

/// Returns the revisions before the last one.
fn before_last(list: &str) -> String {
    without_comments(list.trim_end().rsplit_once('\n').map_or("", |(before, _)| before))
}

/// Returns the revisions, a line each.
fn without_comments(list: &str) -> String {
    let revisions = list.lines().filter(|line| !line.starts_with('#'));
    revisions.flat_map(|line| [line, "\n"]).collect()
}

fn digest(tables: &[String], previous: &str) -> String {
    let mut hasher = Sha256::new();
    let tables = tables.iter().map(|table| with_digested_names(table));
    for text in tables.chain([previous.to_owned()]) {
        hasher.update((text.len() as u64).to_le_bytes());
        hasher.update(text);
    }
    hasher.finalize().iter().take(16).map(|byte| format!("{byte:02x}")).collect()
}

/// Returns a table with the names that the digest of the newest revision covers.
fn with_digested_names(table: &str) -> String {
    let renamed = RENAMED.iter();
    renamed.fold(table.to_owned(), |table, (now, before)| table.replace(now, before))
}

/// Returns the committed states of the list, the oldest first; none without git.
fn history() -> Vec<String> {
    let file = format!("./{PATH}");
    let commits = git(&["log", "--first-parent", "--format=%H", "--", &file]).unwrap_or_default();
    let states = commits.lines().rev().map(|commit| git(&["show", &format!("{commit}:{file}")]));
    states.flatten().collect()
}

fn git(arguments: &[&str]) -> Option<String> {
    let directory = env!("CARGO_MANIFEST_DIR");
    let output = Command::new("git").arg("-C").arg(directory).args(arguments).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}
