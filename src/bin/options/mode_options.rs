//! [`ModeOptions`]: the update mode, as `--synchronous A/R` or as the classic `--issync 0|1`.

use clap::{ArgGroup, Args, value_parser};
use pushpull::job::Replicas;

/// The flags that choose the update mode.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Synchronous training")]
#[command(group(ArgGroup::new("mode").args(["synchronous", "issync"]).multiple(true)))]
pub(crate) struct ModeOptions {
    /// Make each step of the mean of A gradients of R replicas, such as 4/5 [default: none]
    #[arg(long, value_name = "A/R")]
    pub(crate) synchronous: Option<Replicas>,
    /// 1 for --synchronous N/N with the N workers of the cluster, 0 for asynchronous
    #[arg(long, value_name = "0|1", value_parser = value_parser!(u8).range(0..=1))]
    pub(crate) issync: Option<u8>,
}

impl ModeOptions {
    /// Returns the replicas of a synchronous step; `None` in asynchronous mode. `workers` is the
    /// number of workers that the cluster lists.
    ///
    /// # Errors
    /// Returns the text to print, which names the flag.
    pub(crate) fn replicas(&self, workers: u32) -> Result<Option<Replicas>, String> {
        let chosen = Replicas::choose(self.synchronous, self.issync, workers);
        chosen.map_err(|error| format!("--issync {}: {error}", self.issync.unwrap_or(0)))
    }
}
