//! `pushpull rendezvous`: gathers the addresses of a cluster for the tasks of a launcher that tells
//! nobody its peers, and prints the cluster.

use std::error::Error;
use std::fmt::Display;

use clap::Args;
use pushpull::TaskId;
use pushpull::cluster::rendezvous::{ClusterRendezvous, ClusterSize, RendezvousEvent};
use pushpull::error::ListenError;
use pushpull::security::Credentials;
use pushpull::server::raise_open_files_limit;

use super::options::{EndSignals, ExitWithParent, SecurityOptions};
use super::output::{print_error, print_lines};
use super::resolve::cluster_flags;

/// Options of `pushpull rendezvous`.
#[derive(Debug, Args)]
#[command(next_help_heading = "Rendezvous")]
pub(crate) struct RendezvousCommand {
    /// Address to listen on; port 0 takes a free one
    #[arg(long, value_name = "ADDRESS")]
    listen: String,
    /// Number of ps tasks
    #[arg(long, value_name = "N")]
    num_ps: u32,
    /// Number of workers
    #[arg(long, value_name = "M")]
    num_workers: u32,
    /// Let every machine register, without encryption
    #[arg(long)]
    insecure: bool,
    #[command(flatten)]
    security: SecurityOptions,
    #[command(flatten)]
    pub(crate) parent: ExitWithParent,
}

/// Serves the rendezvous until all tasks have registered and ended, or a signal arrives.
pub(crate) fn run(command: &RendezvousCommand) -> Result<(), Box<dyn Error>> {
    command.parent.apply()?;
    let size = ClusterSize::new(command.num_ps, command.num_workers)?;
    if let Err(error) = raise_open_files_limit() {
        print_error(&format_args!("the limit of open files stays as it is: {error}"));
    }
    let credentials = command.security.credentials(&TaskId::new("rendezvous", 0))?;
    let is_protected = credentials.as_ref().is_some_and(Credentials::protect);
    let may_be_reached = command.insecure || is_protected;
    let rendezvous = ClusterRendezvous::listen(&command.listen, size, may_be_reached);
    let rendezvous = rendezvous.map(|rendezvous| rendezvous.credentials(credentials));
    let rendezvous = rendezvous.map_err(|error| match error {
        ListenError::Exposed { .. } => format!("{error}: give --insecure").into(),
        error => Box::<dyn Error>::from(error),
    })?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut signals = EndSignals::watch()?;
        print_lines(&format!("rendezvous  {}", rendezvous.address()))?;
        let mut last = None;
        let print = move |event: RendezvousEvent| {
            if last.as_ref() == Some(&event) {
                return;
            }
            match &event {
                RendezvousEvent::Gathered(cluster) => {
                    print(&format!("flags       {}", cluster_flags(cluster)));
                    print(&format!("json        {}", cluster.to_json()));
                }
                event => print_error(event),
            }
            last = Some(event);
        };
        tokio::select! {
            () = rendezvous.serve(print) => {}
            () = signals.any() => {}
        }
        Ok(())
    })
}

/// Prints a line. If nobody reads it, the tasks are served nevertheless.
fn print(line: &dyn Display) {
    let _ = print_lines(&line.to_string());
}
