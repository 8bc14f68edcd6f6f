//! Saying hello, and what the welcome must agree with.

use std::time::{Duration, Instant};

use pushpull_common::cluster::ClusterSpec;
use pushpull_common::identity::Identity;
use pushpull_common::protocol::message::{BodyCrc, Hello, ModeIs, Welcome};
use pushpull_common::protocol::refusal::short_hash;
use pushpull_common::protocol::wire::{List, Text};
use pushpull_common::protocol::{Envelope, Header, Message, Refusal, limits, version};

use super::link::{Pending, Status};
use super::{Session, Welcomed};
use crate::config::Checksums;
use crate::error::Error;
use crate::parts::Body;

impl Session {
    /// The transport is connected: says who we are.
    pub(super) fn connected(&mut self, now: Instant, index: usize, same_host: bool) {
        let seen_epoch = self.seen_epoch(index);
        let link = &mut self.links[index];
        if link.status != Status::Connecting {
            return;
        }
        link.status = Status::Greeting;
        (link.same_host, link.asked_to_share, link.asked_for_push_buffer) =
            (same_host, false, false);
        link.crc = false;
        let hello = Hello {
            version_oldest: version::OLDEST,
            version_newest: version::NEWEST,
            role: self.start.role,
            job: Text::clipped(&*self.start.task.job),
            task: self.start.task.index,
            shard: link.shard,
            incarnation: self.start.incarnation,
            client_epoch: self.epoch,
            seen_epoch,
            seen_step: self.step,
            catalogue: self.plan.as_ref().map(|plan| plan.catalogue().digest()),
            body_crc: match self.start.checksums {
                Checksums::Remote => BodyCrc::Auto {},
                Checksums::Always => BodyCrc::On {},
                Checksums::Never => BodyCrc::Off {},
            },
            identity: self.start.identity.to_wire(),
            auth: List::default(),
        };
        self.send(now, index, Pending::Hello, Envelope::default(), hello, Body::Empty);
    }

    pub(super) fn greeted(
        &mut self,
        now: Instant,
        index: usize,
        header: &Header,
        message: Message,
    ) {
        match message {
            Message::Welcome(welcome) => self.welcome(now, index, header, &welcome),
            Message::Refused(refused) => self.not_welcome(now, index, refused.refusal),
            message => self.unexpected(now, index, &message),
        }
    }

    fn welcome(&mut self, now: Instant, index: usize, header: &Header, welcome: &Welcome) {
        let identity = Identity::from_wire(&welcome.identity);
        if let Some(error) = self.disagreement(index, &identity) {
            return self.fail(error);
        }
        if !self.welcome_epoch(now, index, welcome) {
            return;
        }
        if self.links[index].shard == self.start.owner {
            self.step = self.step.max(header.step);
            self.synchronous = matches!(welcome.mode, ModeIs::Synchronous { .. });
            self.owner_first = welcome.mode == (ModeIs::Asynchronous { owner_first: true });
        }
        if self.start.role.is_member() {
            self.epoch = self.epoch.max(welcome.client_epoch);
        }
        let link = &mut self.links[index];
        link.crc = welcome.body_crc == BodyCrc::On {};
        link.identity = identity;
        link.lease = Duration::from_millis(welcome.lease_ms.max(100).into());
        let (shards_per_task, non_finite) = (welcome.shards, welcome.non_finite);
        let mut encodings = self.welcomed.take().map_or_else(Default::default, |w| w.encodings);
        encodings.insert(link.shard, welcome.encodings);
        let synchronous = self.synchronous;
        self.welcomed = Some(Welcomed { shards_per_task, non_finite, synchronous, encodings });
        self.links[index].status = Status::Up;
        self.welcomed_at(index);
        self.drive(now);
    }

    /// How a server's identity differs from that of another this session works with.
    fn disagreement(&self, index: usize, identity: &Identity) -> Option<Error> {
        let others = self.links.iter().enumerate().filter(|&(other, _)| other != index);
        others.into_iter().find_map(|(_, other)| {
            let (field, left_value, right_value) = other.identity.difference(identity)?;
            Some(Error::Identity {
                left: other.shard,
                right: self.links[index].shard,
                field: field.to_owned(),
                left_value: left_value.to_owned(),
                right_value: right_value.to_owned(),
                left_hash: short_hash(&other.identity.hash()),
                right_hash: short_hash(&identity.hash()),
            })
        })
    }

    fn not_welcome(&mut self, now: Instant, index: usize, refusal: Refusal) {
        match refusal {
            // These pass; the deadline of whoever waits says for how long to try.
            Refusal::Stopping {} | Refusal::Busy { .. } => {
                self.break_off(now, index, refusal.to_string());
            }
            refusal if self.hello_epoch_refused(now, index, &refusal) => {}
            refusal => {
                let error = self.refused("connect", index, refusal);
                self.fail(error);
            }
        }
    }
}

// Every job name that a cluster can have fits a hello.
const _: () = assert!(ClusterSpec::JOB_NAME_BYTES_MAX == limits::JOB_BYTES_MAX);
