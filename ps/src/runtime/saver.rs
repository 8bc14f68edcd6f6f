//! The saving thread of the step owner's task: it begins a checkpoint, has every shard write its
//! part, publishes it, and lets go of old ones. It may wait for disks and for other tasks.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use pushpull_common::catalogue::Catalogue;
use pushpull_common::ids::{GlobalStep, RestoreEpoch, ShardId};
use pushpull_common::protocol::message::CheckpointId;
use pushpull_common::protocol::wire::Text;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use super::peer::{Introduction, save_shard};
use crate::checkpoint::{
    CheckpointName, Contents, OptimizerEntry, Save, ShardEntry, newest_good, retain,
};
use crate::config::Checkpoints;
use crate::metrics::Counters;
use crate::optimizer::Optimizer;
use crate::shard::checkpoints::{News, Order};

/// A wish of somebody in this process, who waits for what comes of it.
pub(super) type Wish = (Vec<u8>, oneshot::Sender<Result<CheckpointId, String>>);

/// What the saving thread is given.
pub(super) struct Saver {
    pub(super) checkpoints: Checkpoints,
    pub(super) introduction: Introduction,
    /// The addresses of all ps tasks; of this one where it listens.
    pub(super) addresses: BTreeMap<u32, String>,
    pub(super) optimizer: Arc<dyn Optimizer>,
    pub(super) counters: Arc<Counters>,
    pub(super) owner: ShardId,
    pub(super) orders: mpsc::Receiver<Order>,
    pub(super) wishes: mpsc::Receiver<Wish>,
    pub(super) news: mpsc::Sender<News>,
    pub(super) stop: CancellationToken,
}

/// Serves until the server stops, on the thread it is called on.
pub(super) fn run(mut saver: Saver) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let stop = saver.stop.clone();
    runtime.block_on(async {
        tokio::select! {
            () = stop.cancelled() => {}
            () = saver.serve() => {}
        }
    });
    Ok(())
}

impl Saver {
    async fn serve(&mut self) {
        // Whoever has asked in this process, by ticket.
        let mut waiting: BTreeMap<u64, oneshot::Sender<Result<CheckpointId, String>>> =
            BTreeMap::new();
        let mut next_ticket = 1;
        let every = self.checkpoints.every.unwrap_or(Duration::from_secs(u32::MAX.into()));
        let mut due = tokio::time::interval_at(tokio::time::Instant::now() + every, every);
        due.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut saved_step = None;
        loop {
            tokio::select! {
                order = self.orders.recv() => match order {
                    None => return,
                    Some(Order::Find { connection, request }) => {
                        let result = self.find();
                        let _ = self.news.send(News::Found { connection, request, result }).await;
                    }
                    Some(Order::Save { asker, user, catalogue, epoch, step }) => {
                        let result = self.save(user, &catalogue, epoch, step).await;
                        if result.is_ok() {
                            saved_step = Some((epoch, step));
                        }
                        let _ = self.news.send(News::Saved { asker, result }).await;
                    }
                    Some(Order::Tell { ticket, result }) => {
                        if let Some(waiting) = waiting.remove(&ticket) {
                            // Whoever asked may not wait any more.
                            let _ = waiting.send(result);
                        }
                    }
                },
                Some((user, done)) = self.wishes.recv() => {
                    waiting.insert(next_ticket, done);
                    let _ = self.news.send(News::Wished { ticket: next_ticket, user }).await;
                    next_ticket += 1;
                }
                _ = due.tick(), if self.checkpoints.every.is_some() => {
                    // Nothing new is not saved again.
                    let step = GlobalStep(self.counters.global_step.read());
                    if saved_step.is_none_or(|(_, saved)| saved != step) && step.0 > 0 {
                        let due = News::Wished { ticket: 0, user: Vec::new() };
                        let _ = self.news.send(due).await;
                    }
                }
            }
        }
    }

    fn find(&self) -> Result<Option<CheckpointId>, String> {
        let newest = newest_good(&self.checkpoints.storage).map_err(|error| error.to_string())?;
        Ok(newest.map(|(opened, _)| identify(opened.manifest().checkpoint)))
    }

    async fn save(
        &self,
        user: Vec<u8>,
        catalogue: &Catalogue,
        epoch: RestoreEpoch,
        step: GlobalStep,
    ) -> Result<CheckpointId, String> {
        let text = |error: crate::checkpoint::CheckpointError| error.to_string();
        let storage = &self.checkpoints.storage;
        let save = Save::begin(storage.clone(), epoch, step).map_err(text)?;
        let name = save.name().to_string();
        let mut shards: Vec<ShardId> = catalogue.shards().collect();
        if !shards.contains(&self.owner) {
            shards.push(self.owner);
        }
        // All at once: each pins what it has now, so that they are of about one time.
        let parts: Vec<_> = shards
            .into_iter()
            .map(|shard| {
                let (introduction, name) = (self.introduction.clone(), name.clone());
                let address = self.addresses.get(&shard.task).cloned().unwrap_or_default();
                tokio::spawn(async move {
                    save_shard(&introduction, &address, shard, &name, epoch).await
                })
            })
            .collect();
        let mut entries = Vec::new();
        for part in parts {
            let entry = part.await.map_err(|error| error.to_string())??;
            let entry: ShardEntry =
                serde_json::from_slice(&entry).map_err(|error| error.to_string())?;
            entries.push(entry);
        }
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let contents = Contents {
            saved_unix_ms: u64::try_from(since.as_millis()).unwrap_or(u64::MAX),
            optimizer: OptimizerEntry {
                kind: self.optimizer.kind().to_owned(),
                configuration: format!("{:?}", self.optimizer),
                slots: self.optimizer.slots().iter().map(|slot| slot.name.to_owned()).collect(),
            },
            shards: entries,
            user,
        };
        let published = save.publish(catalogue, contents).map_err(text)?;
        self.counters.checkpoints_saved.add(1);
        let saved = identify(published.name());
        // What is published stays so, whatever becomes of older ones.
        retain(&**storage, &published, &self.checkpoints.retention)
            .map_err(|error| format!("{} is saved, but: {error}", published.name()))?;
        Ok(saved)
    }
}

fn identify(name: CheckpointName) -> CheckpointId {
    CheckpointId {
        name: Text::clipped(name.to_string()),
        epoch: RestoreEpoch(name.restore_epoch),
        step: GlobalStep(name.global_step),
    }
}
