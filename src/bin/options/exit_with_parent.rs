//! [`ExitWithParent`]: a process that ends with the one that started it.

use std::fmt;
use std::io;

use clap::Args;

/// The flag of a process that must not outlive the launcher that started it.
#[derive(Clone, Copy, Debug, Args)]
#[command(next_help_heading = "Process")]
pub(crate) struct ExitWithParent {
    /// End as at SIGTERM when the process that started this one ends, killed or not
    #[arg(long)]
    pub(crate) exit_with_parent: bool,
}

/// The reason why a process cannot end with its parent.
#[derive(Debug)]
pub(crate) enum ExitWithParentError {
    /// The parent ended while this process started.
    ParentEnded,
    /// The system has no such signal, or refuses it.
    System(io::Error),
}

impl std::error::Error for ExitWithParentError {}

impl fmt::Display for ExitWithParentError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ExitWithParentError::ParentEnded => {
                f.write_str("--exit-with-parent: the process that started this one has ended")
            }
            ExitWithParentError::System(error) => write!(f, "--exit-with-parent: {error}"),
        }
    }
}

impl ExitWithParent {
    /// Asks the system for SIGTERM at the end of the parent, if the flag was given. The thread that
    /// calls this, and the thread of the parent that started this process, must last as long as
    /// their processes: the system takes their ends for those of the processes.
    ///
    /// # Errors
    /// If the parent has ended already, or the system has no such signal.
    pub(crate) fn apply(self) -> Result<(), ExitWithParentError> {
        if self.exit_with_parent { exit_with_parent() } else { Ok(()) }
    }
}

/// Does what [`ExitWithParent::apply`] does with the flag.
#[cfg(target_os = "linux")]
fn exit_with_parent() -> Result<(), ExitWithParentError> {
    use rustix::process::{Signal, getppid, set_parent_process_death_signal};

    let parent = getppid();
    set_parent_process_death_signal(Some(Signal::TERM))
        .map_err(|error| ExitWithParentError::System(error.into()))?;
    // No signal comes for a parent that ended before. Another process has adopted this one then.
    if getppid() == parent { Ok(()) } else { Err(ExitWithParentError::ParentEnded) }
}

/// Refuses the flag, which needs Linux.
#[cfg(not(target_os = "linux"))]
fn exit_with_parent() -> Result<(), ExitWithParentError> {
    Err(ExitWithParentError::System(io::ErrorKind::Unsupported.into()))
}
