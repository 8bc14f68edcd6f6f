//! Durability across a loss of power: an answer leaves after its commit is on disk.
//!
//! The arena's files are mapped, and the kernel writes their pages back at any time and in any
//! order. So a shard also keeps a *durable image*: the control words and the tables file as of one
//! commit, written alternately to two files. Blocks that an image names are flushed before the
//! image is written, and are not overwritten before the next image is on disk. The outputs of an
//! input are released once an image includes its commit. Many commits share one image.

use std::collections::VecDeque;

use pushpull_common::protocol::Refusal;
use pushpull_common::protocol::refusal::Detail;

use crate::shard::output::{ShardOutput, ShardOutputs};

/// The state of the durable images of a shard.
#[derive(Debug, Default)]
pub(in crate::shard) struct Power {
    /// The number of commits.
    made: u64,
    /// The newest commit in an image on disk.
    durable: u64,
    /// The newest commit in the image that is being written.
    writing: Option<u64>,
    /// The number of images.
    images: u64,
    /// Outputs, each with the commit that must be on disk first.
    held: VecDeque<(u64, ShardOutput)>,
    /// The first commit whose image no longer names the leftover files.
    unnamed_since: Option<u64>,
    /// Why no more images can be written.
    failed: Option<String>,
}

/// The effect of a flush that has ended.
#[derive(Debug)]
pub(in crate::shard) enum FlushOutcome {
    /// No image was being written.
    None,
    /// The image is on disk. `unnamed` says whether no image names the leftover files any more.
    Durable { unnamed: bool },
    /// The shard is read-only from now on, for this reason.
    Failed(String),
}

impl Power {
    /// Continues the numbers of the images of an earlier process.
    pub(in crate::shard) fn resume(images: u64) -> Power {
        // This process has flushed nothing yet. Files that only the old image names are removed
        // once the next image is on disk.
        Power { images, made: 1, unnamed_since: Some(1), ..Power::default() }
    }

    /// Counts a commit.
    pub(in crate::shard) fn count_commit(&mut self) {
        self.made += 1;
    }

    /// Records that no later commit names the files of the variables.
    pub(in crate::shard) fn forget_files(&mut self) {
        self.unnamed_since = Some(self.made);
    }

    /// Holds outputs back until their commit is on disk.
    pub(in crate::shard) fn hold(&mut self, out: &mut ShardOutputs) {
        if self.failed.is_some() {
            return;
        }
        for output in std::mem::take(&mut out.queue) {
            match output {
                // A flush was not taken yet. It waits for no image, because it writes the one that
                // the others wait for.
                ShardOutput::Flush(_) => out.push(output),
                output => self.held.push_back((self.made, output)),
            }
        }
        while self.held.front().is_some_and(|&(mark, _)| mark <= self.durable) {
            out.queue.extend(self.held.pop_front().map(|(_, output)| output));
        }
    }

    /// Returns the number of the next image if there are new commits and none is being written.
    pub(in crate::shard) fn begin_image(&mut self) -> Option<u64> {
        if self.writing.is_some() || self.made == self.durable || self.failed.is_some() {
            return None;
        }
        self.writing = Some(self.made);
        self.images += 1;
        Some(self.images)
    }

    /// Takes the result of a flush. A failure is final.
    pub(in crate::shard) fn flushed(
        &mut self,
        out: &mut ShardOutputs,
        result: Result<(), String>,
    ) -> FlushOutcome {
        let Some(mark) = self.writing.take() else { return FlushOutcome::None };
        let Err(error) = result else {
            self.durable = mark;
            let unnamed = self.unnamed_since.take_if(|since| *since <= mark).is_some();
            return FlushOutcome::Durable { unnamed };
        };
        // Answers that are not durable are dropped, and a client that asks again gets the reason.
        // Orders, events and counts are kept, because a caller of the saver would wait forever.
        let is_kept = |output: &ShardOutput| {
            matches!(
                output,
                ShardOutput::SaverOrder(_)
                    | ShardOutput::Event(_)
                    | ShardOutput::Members { .. }
                    | ShardOutput::Stop
            )
        };
        out.queue.extend(self.held.drain(..).map(|(_, output)| output).filter(is_kept));
        self.failed = Some(error.clone());
        FlushOutcome::Failed(error)
    }

    /// Returns whether a commit waits for an image.
    pub(in crate::shard) fn waits_for_image(&self) -> bool {
        self.failed.is_none() && (self.is_flushing() || self.made != self.durable)
    }

    /// Returns whether an image is being written.
    pub(in crate::shard) fn is_flushing(&self) -> bool {
        self.writing.is_some()
    }

    /// Returns the refusal of everything except pulls after a failed flush.
    pub(in crate::shard) fn refusal(&self) -> Option<Refusal> {
        let failed = self.failed.as_ref()?;
        let detail = format!("the shard is read-only since a flush failed: {failed}");
        Some(Refusal::Storage { detail: Detail::clipped(detail) })
    }
}
