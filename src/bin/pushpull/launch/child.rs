//! `pushpull launch-child`: becomes a program that the kernel kills when the launcher ends.

use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use clap::Args;

use super::super::output::print_error;

/// Options of `pushpull launch-child`.
#[derive(Debug, Args)]
#[command(next_help_heading = "Process")]
pub(crate) struct ChildOptions {
    /// Process that starts this one
    #[arg(long, value_name = "PID")]
    parent: i32,
    /// Program to become, and its arguments
    #[arg(last = true, required = true, value_name = "PROGRAM")]
    program: Vec<String>,
}

/// Exit code of a shell for a program that is not there.
const EXIT_NOT_FOUND: u8 = 127;
/// Exit code of a shell for a program that cannot be executed.
const EXIT_NOT_EXECUTABLE: u8 = 126;

/// Becomes the program. Returns only if it cannot.
///
/// The launcher cannot set the signal itself: between fork and exec that would be unsafe code. The
/// signal is SIGKILL, which no program can ignore: a launcher that was killed has nobody left to send
/// it later. A program with `--exit-with-parent` sets SIGTERM in its place.
pub(crate) fn run(options: &ChildOptions) -> ExitCode {
    if let Err(error) = follow(options.parent) {
        print_error(&error);
        return ExitCode::from(EXIT_NOT_EXECUTABLE);
    }
    let [program, arguments @ ..] = &options.program[..] else {
        print_error(&"there is no program to become");
        return ExitCode::from(EXIT_NOT_FOUND);
    };
    let error = Command::new(program).args(arguments).exec();
    print_error(&format!("cannot run {program}: {error}"));
    ExitCode::from(match error.kind() {
        std::io::ErrorKind::NotFound => EXIT_NOT_FOUND,
        _ => EXIT_NOT_EXECUTABLE,
    })
}

#[cfg(target_os = "linux")]
fn follow(parent: i32) -> Result<(), String> {
    use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};

    set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|error| format!("cannot follow the launcher: {error}"))?;
    // No signal comes for a launcher that has ended before.
    match Pid::as_raw(getppid()) == parent {
        true => Ok(()),
        false => Err(format!("the launcher {parent} has ended")),
    }
}

/// Other systems have no such signal.
#[cfg(not(target_os = "linux"))]
fn follow(_: i32) -> Result<(), String> {
    Ok(())
}
