//! Cuts: what a shard's part of a checkpoint is made of, which its values at one moment are.
//!
//! In asynchronous mode each shard cuts when it is asked for its part. In synchronous mode all cut
//! after the same step: the step owner tells them over the connections on which it also tells what is
//! committed, at a time when all have applied that step and none can have applied the next. A shard
//! keeps its cut until it is asked for its part, and training goes on meanwhile.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use bytes::Bytes;
use pushpull_common::ids::GlobalStep;
use pushpull_common::protocol::{Envelope, message};

use super::Shard;
use super::checkpoints::Asker;
use super::output::Output;
use crate::checkpoint::{CheckpointName, ClientWindow};
use crate::store::Image;

/// A shard's values at one moment, pinned, and what it had counted.
#[derive(Debug)]
pub(crate) struct Cut {
    /// The global step, as far as the shard knew it.
    step: GlobalStep,
    pub(super) image: Image,
    /// Set when the memory that it pins is needed.
    pub(super) memory_needed: Arc<AtomicBool>,
    pub(super) version: u64,
    pub(super) gradients: u64,
    pub(super) clients: Vec<ClientWindow>,
    since: Instant,
}

/// Checkpoints that may wait for the one that is being saved.
const WISHES_MAX: usize = 16;

impl Shard {
    fn cut(&self, now: Instant) -> Option<Cut> {
        let store = self.store().filter(|_| self.is_ready())?;
        let memory_needed = Arc::new(AtomicBool::new(false));
        Some(Cut {
            step: self.step(),
            image: store.image(memory_needed.clone()),
            memory_needed,
            version: self.version,
            gradients: self.gradients,
            clients: self.replicas.windows(),
            since: now,
        })
    }

    /// What is to be written to this checkpoint, or why there is nothing.
    pub(super) fn take_cut(&mut self, now: Instant, name: CheckpointName) -> Result<Cut, String> {
        let step = GlobalStep(name.global_step);
        if self.is_synchronous() {
            if let Some(cut) = self.kept_cut.take_if(|cut| cut.step == step) {
                return Ok(cut);
            }
            if self.step() != step {
                let found = self.step();
                return Err(format!("it has values of step {found}, and kept none of step {step}"));
            }
        }
        self.cut(now).ok_or_else(|| "the variables have no values".to_owned())
    }

    /// The step owner wants what is here after this step to be kept.
    pub(super) fn keep_cut(&mut self, now: Instant, step: GlobalStep) {
        if self.is_synchronous() && self.step() == step {
            self.kept_cut = self.cut(now);
        }
    }

    /// Forgets a cut that nobody has asked for.
    pub(super) fn drop_old_cut(&mut self, now: Instant) {
        let patience = self.config.stall_timeout;
        self.kept_cut.take_if(|cut| now.saturating_duration_since(cut.since) >= patience);
    }

    /// On the step owner, in synchronous mode: a checkpoint is wished for, and saved when every shard
    /// has applied the same steps and the one before is saved.
    pub(super) fn wish_for_save(&mut self, now: Instant, asker: Asker, user: Vec<u8>) {
        if self.wishes.len() == WISHES_MAX {
            let error = format!("cannot save now: {WISHES_MAX} saves wait already");
            return self.saved(asker, Err(error));
        }
        self.wishes.push_back((asker, user));
        self.begin_wished_save(now);
    }

    /// Has all shards cut, if there is a wish and this is the moment.
    pub(super) fn begin_wished_save(&mut self, now: Instant) {
        let applied = self.admission().is_some_and(|admission| !admission.is_behind());
        if self.saves_a_cut || !applied {
            return;
        }
        let Some((asker, user)) = self.wishes.pop_front() else { return };
        let step = self.step();
        for connection in self.parts.values().copied().collect::<Vec<u64>>() {
            let envelope = Envelope { step, restore_epoch: self.epoch, ..Envelope::default() };
            let (message, body) = (message::KeepCut {}.into(), Bytes::new());
            self.outputs.push_back(Output::Send { connection, envelope, message, body });
        }
        self.keep_cut(now, step);
        self.saves_a_cut = true;
        self.order_save(asker, user);
    }

    /// Nothing of the past is to be saved: another restore epoch begins.
    pub(super) fn drop_wishes(&mut self) {
        self.kept_cut = None;
        for (asker, _) in std::mem::take(&mut self.wishes) {
            self.saved(asker, Err("a checkpoint is restored".to_owned()));
        }
    }
}
