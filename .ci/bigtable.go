// Google's emulator of Bigtable as a program: what its Cloud CLI calls cbtemulator.
package main

import (
	"flag"
	"fmt"
	"log"

	"cloud.google.com/go/bigtable/bttest"
	"google.golang.org/grpc"
)

func main() {
	host := flag.String("host", "127.0.0.1", "")
	port := flag.Int("port", 9000, "")
	flag.Parse()
	limit := 256 << 20
	server, err := bttest.NewServer(fmt.Sprintf("%s:%d", *host, *port), grpc.MaxRecvMsgSize(limit), grpc.MaxSendMsgSize(limit))
	if err != nil {
		log.Fatal(err)
	}
	log.Println("serves on", server.Addr)
	select {}
}
