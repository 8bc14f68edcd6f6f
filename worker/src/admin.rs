//! Administration of a training from elsewhere: its status, checkpoints, and its end.

use bytes::Bytes;
use pushpull_common::ids::{ShardId, TaskId};
use pushpull_common::protocol::Message;
use pushpull_common::protocol::limits::USER_BLOB_BYTES_MAX;
use pushpull_common::protocol::message::{self, Role};
use pushpull_common::status::Status;

use crate::client::SessionClient;
use crate::config::WorkerConfig;
use crate::error::Error;
use crate::outcome::SavedCheckpoint;

/// Administers a training: asks what it does, saves checkpoints, finishes it, and stops its servers.
///
/// An administrator holds no lease, and trains and reads nothing. To servers that ask their clients
/// who they are, it proves that it has the role `admin`. Each order is an event of the server, which
/// names who has given it.
#[derive(Debug)]
pub struct Admin {
    client: SessionClient,
}

impl Admin {
    /// Connects to the step owner, for at most [`WorkerConfig::connect_timeout`]. The task of the
    /// configuration only names the administrator; the cluster need not contain it.
    ///
    /// Dropping the future ends the session.
    ///
    /// # Errors
    /// [`Error::Unproven`] if the server asks for a proof that the configuration does not have, and
    /// those of the session.
    pub async fn connect(config: WorkerConfig) -> Result<Admin, Error> {
        Ok(Admin { client: SessionClient::connect(config, Role::Admin {}).await? })
    }

    /// Returns what the training does, as the step owner knows it. At most the first 100 workers
    /// that have never joined are named.
    ///
    /// Cost: one request for each 100 members.
    ///
    /// # Errors
    /// [`Error::Timeout`], and those of the session.
    pub async fn status(&self) -> Result<Status, Error> {
        let mut status: Option<Status> = None;
        loop {
            let known = status.as_ref().map_or(0, |status| status.members.len());
            let members_from = u32::try_from(known).unwrap_or(u32::MAX);
            let query = message::StatusQuery { members_from };
            let answer = self.request("ask for the status", query, Bytes::new()).await?;
            let Message::StatusIs(is) = answer else { return Err(ended("ask for the status")) };
            let count = is.members_count as usize;
            let page = Status::from_wire(is);
            let is_last = page.members.is_empty() || known + page.members.len() >= count;
            let status = match &mut status {
                None => status.insert(page),
                Some(status) => {
                    let members = std::mem::take(&mut status.members);
                    let newest = page.members;
                    *status = Status { members, ..page };
                    status.members.extend(newest);
                    status
                }
            };
            if is_last {
                return Ok(status.clone());
            }
        }
    }

    /// Saves a checkpoint of all variables and optimizer slots, with at most 1 MiB of the caller's
    /// own data. The training continues meanwhile: see [`crate::Worker::save`].
    ///
    /// # Errors
    /// [`Error::UserBlob`] if `user` is too long; the refusals of the servers; [`Error::Timeout`]
    /// after [`WorkerConfig::save_timeout`].
    pub async fn save(&self, user: &[u8]) -> Result<SavedCheckpoint, Error> {
        let doing = "save a checkpoint";
        let (bytes, limit) = (user.len() as u64, USER_BLOB_BYTES_MAX);
        if bytes > limit {
            return Err(Error::UserBlob { bytes, limit });
        }
        let client = &self.client;
        let user = Bytes::copy_from_slice(user);
        let timeout = client.config.save_timeout;
        match client.request(doing, client.owner, message::Save {}, user, timeout).await? {
            (Message::Saved(saved), _) => Ok(saved.checkpoint.into()),
            _ => Err(ended(doing)),
        }
    }

    /// Ends the training for all workers: the step owner grants no more tokens.
    ///
    /// # Errors
    /// [`Error::Timeout`], and those of the session.
    pub async fn finish(&self) -> Result<(), Error> {
        self.request("finish the training", message::Finish {}, Bytes::new()).await.map(|_| ())
    }

    /// Stops every ps task for good, the step owner last: each answers what is complete, says
    /// goodbye, and ends as by `PsHandle::stop`. Nothing is saved: see [`Admin::save`].
    ///
    /// Returns the tasks that have not confirmed it, with the reason. It waits for each of them for
    /// at most [`WorkerConfig::connect_timeout`], and needs none of the others.
    pub async fn stop_servers(config: &WorkerConfig) -> Vec<(TaskId, Error)> {
        let owner = config.cluster.step_owner().map(|task| task.index);
        let tasks = config.cluster.ps_tasks().map(|(task, _)| task);
        let others = tasks.filter(|&task| Some(task) != owner);
        let mut unconfirmed = Vec::new();
        for task in others.chain(owner) {
            match stop(config.clone(), ShardId { task, shard: 0 }).await {
                // It has ended, by this order or another.
                Ok(()) | Err(Error::ServerStopped { .. }) => {}
                Err(error) => unconfirmed.push((TaskId::ps(task), error)),
            }
        }
        unconfirmed
    }

    /// Sends a request to the step owner, and returns its answer.
    async fn request(
        &self,
        doing: &'static str,
        message: impl Into<Message>,
        body: Bytes,
    ) -> Result<Message, Error> {
        let client = &self.client;
        let timeout = client.config.timeout;
        Ok(client.request(doing, client.owner, message, body, timeout).await?.0)
    }
}

fn ended(doing: &'static str) -> Error {
    Error::Ended { doing }
}

/// Stops the task of a shard.
async fn stop(config: WorkerConfig, shard: ShardId) -> Result<(), Error> {
    let client = SessionClient::connect_to(config, Role::Admin {}, Some(shard)).await?;
    let timeout = client.config.timeout;
    client.request("stop", shard, message::Stop {}, Bytes::new(), timeout).await.map(|_| ())
}
