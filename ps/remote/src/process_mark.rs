//! The mark of a process, by which another one of the same machine finds out that it has ended.

use std::fs;

use serde::{Deserialize, Serialize};

/// A process of a machine, since it has started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ProcessMark {
    /// The boot of the machine.
    boot: String,
    /// The namespace of the number: every container has a process 1.
    namespace: String,
    process: u32,
    /// When it has started, in ticks since the boot.
    started: String,
}

impl ProcessMark {
    /// Returns the mark of this process; `None` where `/proc` does not tell it.
    pub(crate) fn current() -> Option<ProcessMark> {
        let process = std::process::id();
        Some(ProcessMark {
            boot: boot()?,
            namespace: namespace()?,
            process,
            started: started(process)?,
        })
    }

    /// Returns whether the process has ended for certain. Of a process on another machine, or in
    /// another container, that is never certain.
    pub(crate) fn has_ended(&self) -> bool {
        let is_visible =
            boot().as_ref() == Some(&self.boot) && namespace().as_ref() == Some(&self.namespace);
        is_visible && started(self.process).as_ref() != Some(&self.started)
    }
}

fn boot() -> Option<String> {
    let id = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(id.trim().to_owned())
}

fn namespace() -> Option<String> {
    let link = fs::read_link("/proc/self/ns/pid").ok()?;
    Some(link.to_string_lossy().into_owned())
}

/// Returns when a process has started; `None` if there is none, or only its exit status is left.
fn started(process: u32) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The name of the program is in brackets, and may have any characters.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?;
    let started = fields.nth(18)?;
    (!matches!(state, "Z" | "X")).then(|| started.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ended_process_is_known_by_its_start() {
        let Some(own) = ProcessMark::current() else {
            return println!("skipped: there is no /proc");
        };
        assert!(!own.has_ended());
        let reused = ProcessMark { started: "1".to_owned(), ..own.clone() };
        assert!(reused.has_ended());
        let elsewhere = ProcessMark { boot: "other".to_owned(), ..reused.clone() };
        let contained = ProcessMark { namespace: "pid:[1]".to_owned(), ..reused };
        assert!(!elsewhere.has_ended() && !contained.has_ended());
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let ended = ProcessMark { process: child.id(), ..own };
        child.wait().unwrap();
        assert!(ended.has_ended());
    }
}
